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
_NO_ADDRESSES = "failed to map segment"  # the loader's error where the address space is exhausted

# Name -> its line in `quire --help`; the module is quire.cli.<name>.
COMMANDS = {
    "serve": "serve a model over an OpenAI-compatible HTTP interface",
    "run": "answer one prompt",
    "chat": "talk with a model",
    "embed": "make a file of vectors of the texts in a file",
    "fit": "say what memory a model needs here, without loading it",
    "bench": "measure a server or the engine",
    "quantize": "write a quantized checkpoint of a model",
    "verify": "compare a model with transformers, op by op",
}

# Commands that log at level info; the others print a result, and log only warnings.
TALKATIVE = frozenset({"serve"})


class Command(Protocol):
    """What a subcommand's module offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int:
        """Do the work and return the exit code."""
        ...


def load_command(name: str) -> Command:
    return cast(Command, importlib.import_module(f"quire.cli.{name}"))


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """All subcommands by name, but only the chosen one with its arguments."""
    parser = Parser(
        prog="quire", description="Run language models.", epilog="quire COMMAND --help explains a command."
    )
    parser.add_argument("--version", action="version", version=f"quire {quire.__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        subparser.add_argument("--debug", action="store_true", help="show debug messages, and tracebacks of errors")
        if name == chosen:
            command = load_command(name)
            command.add_arguments(subparser)
            subparser.set_defaults(run=command.run)
    return parser


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
