"""`quire chat [MODEL]`: a conversation in the terminal, or over a pipe with one message a line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from quire.cli.stream import print_answer
from quire.config.args import (
    add_engine_arguments,
    add_sampling_arguments,
    engine_settings_from,
    sampling_params_from,
)
from quire.types.errors import GenerationError, RequestError

if TYPE_CHECKING:
    from quire.frontend.llm import LLM
    from quire.types.sampling import SamplingParams

DEFAULTS = {"temperature": 0.7, "top_p": 0.95, "max_tokens": None}
PROMPT = "> "
HELP = """\
/clear  forget the conversation
/help   this list
/exit   leave; so does Ctrl-D
Ctrl-C stops an answer, not the program."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="instructions that the whole conversation follows")
    add_sampling_arguments(parser, DEFAULTS)
    add_engine_arguments(parser, without={"seed"})


def run(args: argparse.Namespace) -> int:
    params = sampling_params_from(args, **DEFAULTS, output_kind="delta")
    from quire import LLM  # after the arguments are known to be good: this import is slow

    chat = Chat(LLM(**engine_settings_from(args)), params, args.system)
    if sys.stdin.isatty():
        import readline  # noqa: F401  (gives input() line editing and history)

        say("Write a message. /help lists the commands.")
    for line in read_lines():
        if not chat.handle(line):
            break
    return 0


class Chat:
    """The conversation so far, and the model it is held with."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._start = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._start)

    def handle(self, line: str) -> bool:
        """Run a command or answer a message; False for the command that ends the chat."""
        line = line.strip()
        if line == "/exit":
            return False
        if line == "/clear":
            self.messages = list(self._start)
            say("The conversation starts anew.")
        elif line == "/help":
            say(HELP)
        elif line.startswith("/") and " " not in line:
            say(f"unknown command {line}; /help lists the commands")
        elif line:
            self._answer(line)
        return True

    def _answer(self, text: str) -> None:
        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            answer = print_answer(self._llm.stream(asked, self._params), sys.stdout)
        except (RequestError, GenerationError) as error:
            say(f"error: {error}")
            return
        if answer.text:  # an interrupted answer stays as far as it went: the user saw it
            self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        if sys.stderr.isatty():
            say(f"[{answer.stats()}]")


def read_lines() -> Iterator[str]:
    """Lines of stdin up to its end; on a terminal with a prompt, where Ctrl-C discards the line."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    while True:
        try:
            yield input(PROMPT)
        except KeyboardInterrupt:
            say("\n/exit or Ctrl-D leaves.")
        except EOFError:
            say("")
            return


def say(text: str) -> None:
    """Everything but the answers goes to stderr, so that a pipe gets the answers alone."""
    print(text, file=sys.stderr)
