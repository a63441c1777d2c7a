"""The `quire` command: finds the subcommand, runs it, and turns errors into one line and an exit code.

Imports nothing heavy: a subcommand's module is imported only when it is the one asked for.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Protocol, cast

import quire
from quire.cli.parser import Parser
from quire.config import env
from quire.types.errors import QuireError
from quire.utils.log import setup_logging

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130  # what a shell reports for SIGINT
EXIT_BROKEN_PIPE = 141  # and for SIGPIPE
_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNUSABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
_NO_ADDRESSES = "failed to map segment"  # the loader's error where the address space is exhausted

# What people want to do -> name of a command -> its line in `quire --help`; the module is quire.cli.<name>.
TASKS = {
    "Talk with a model": {
        "run": "answer one prompt, or talk with a model",
        "chat": "talk with a model",
        "embed": "make a file of vectors of the texts in a file",
    },
    "Serve a model": {
        "serve": "serve a model over HTTP: a page to chat, and the APIs of OpenAI, Anthropic and Ollama",
        "worker": "run a part of a model that another machine serves",
        "ps": "list the servers that run here",
        "stop": "stop a server",
        "top": "watch a server at work",
        "ctl": "have a running server do something, such as restart its engine",
    },
    "Keep models": {
        "pull": "download a model",
        "list": "list the models on this machine",
        "show": "say what a model is",
        "rm": "delete a model from Quire's folder",
        "quantize": "write a quantized checkpoint of a model",
    },
    "Look after it": {
        "doctor": "check this machine, and say what to do",
        "fit": "say what memory a model needs here, without loading it",
        "bench": "measure a server or the engine",
        "plan": "say what clients would see of a load on a machine, by simulation",
        "replay": "run a recorded trace again and compare every step",
        "explain": "say what an engine that died was doing",
        "verify": "compare a model with transformers, op by op",
        "completion": "print the shell's completion of this command",
    },
}
COMMANDS = {name: summary for commands in TASKS.values() for name, summary in commands.items()}

# Commands that log at level info; the others print a result, and log only warnings.
TALKATIVE = frozenset({"serve", "worker"})


class Command(Protocol):
    """What a subcommand's module offers."""

    def add_arguments(self, parser: Parser) -> None: ...

    def run(self, args: argparse.Namespace) -> int:
        """Do the work and return the exit code."""
        ...


def load_command(name: str) -> Command:
    return cast(Command, importlib.import_module(f"quire.cli.{name}"))


def build_parser(chosen: str | None) -> Parser:
    """All subcommands by name, but only the chosen one with its arguments."""
    parser = Parser(prog="quire", usage="quire COMMAND [flags]", description="Run language models.")
    parser.listing = listing()
    parser.add_argument("--version", action="version", version=f"quire {quire.__version__}")
    subparsers = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", required=True, prog="quire"
    )
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        subparser.add_argument("--debug", action="store_true", help="show debug messages, and tracebacks of errors")
        if name == chosen:
            command = load_command(name)
            command.add_arguments(subparser)
            subparser.shorten_help()
            subparser.set_defaults(run=command.run)
    return parser


def listing() -> str:
    """The commands by task."""
    lines = []
    for task, commands in TASKS.items():
        lines += [f"{task}:", *(f"  {name:<12}{summary}" for name, summary in commands.items()), ""]
    return "\n".join([*lines, "quire COMMAND --help explains a command; quire --version says which this is."])


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    args = build_parser(chosen).parse_args(arguments)
    level = "DEBUG" if args.debug else env.log_level(default="info" if chosen in TALKATIVE else "warning")
    setup_logging(level)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except QuireError as error:
        if level == "DEBUG":
            raise
        report(error)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader went away (`quire run ... | head`)
        _drop_output()
        return EXIT_BROKEN_PIPE
    except (MemoryError, ImportError) as error:
        if isinstance(error, ImportError) and _NO_ADDRESSES not in str(error):
            raise
        report(QuireError(f"memory ran out while starting ({error}); raise ulimit -v, or free some memory"))
        return EXIT_ERROR
    except OSError as error:
        if error.errno in _UNUSABLE and error.filename is not None and level != "DEBUG":
            why = f"{error.filename} cannot be used: {error.strerror}"
            report(QuireError(f"{why}; name another path, or make this one readable and writable"))
            return EXIT_ERROR
        if error.errno not in _FULL:
            raise
        _drop_output()
        report(QuireError(f"the output cannot be written: {error.strerror}; free some space and run it again"))
        return EXIT_ERROR
    return code


def _drop_output() -> None:
    """Python would complain once more when it closes a stdout that takes nothing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def report(error: QuireError) -> None:
    """Print the details of an error, if it has any, and then its cause and fix as the last line."""
    cause, *details = str(error).splitlines() or [type(error).__name__]
    print(*details, f"error: {cause}", sep="\n", file=sys.stderr)
