"""`quire chat [MODEL]`: a conversation in the terminal, or over a pipe with one message a line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from quire.cli.chat_commands import HELP, SavedChat, load_chat, save_chat, with_parameter
from quire.cli.loading import open_llm
from quire.cli.parser import Parser
from quire.cli.screen import Style, screen
from quire.cli.stream import print_answer
from quire.config.args import (
    add_engine_arguments,
    add_sampling_arguments,
    engine_settings_from,
    sampling_params_from,
)
from quire.config.groups import DEFAULT_MODEL
from quire.types.errors import GenerationError, RequestError

if TYPE_CHECKING:
    from quire.frontend.llm import LLM
    from quire.types.sampling import SamplingParams

DEFAULTS = {"temperature": 0.7, "top_p": 0.95, "max_tokens": None}
COMMON = (
    *("--system", "--temperature", "--top-p", "--top-k", "--max-tokens", "--seed"),
    *("--max-model-len", "--quantization", "--kv-cache-memory", "--device"),
)
PROMPT = "> "
SEVERAL_LINES = '"""'
_STYLES: dict[str, Style] = {"wordwrap": "wrap", "nowordwrap": "plain", "markdown": "markdown", "plain": "plain"}


def add_arguments(parser: Parser) -> None:
    parser.common = COMMON
    parser.add_argument("--system", metavar="TEXT", help="instructions that the whole conversation follows")
    add_sampling_arguments(parser, DEFAULTS)
    add_engine_arguments(parser, without={"seed"})


def run(args: argparse.Namespace) -> int:
    return converse(args, engine_settings_from(args))


def converse(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    """Talk until the input ends; also what `quire run MODEL` does on a terminal."""
    params = sampling_params_from(args, **DEFAULTS, output_kind="delta")
    chat = Chat(open_llm(settings), params, args.system, settings.get("model", DEFAULT_MODEL))
    if sys.stdin.isatty():
        import readline  # noqa: F401  (gives input() line editing and history)

        say("Write a message. /help lists the commands.")
    for message in read_messages(read_lines()):
        try:
            if not chat.handle(message):
                break
        except KeyboardInterrupt:  # before the answer began, or after its end
            say("\n/exit or Ctrl-D leaves.")
    return 0


class Chat:
    """The conversation so far, and the model it is held with."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, model: str) -> None:
        self._llm = llm
        self._model = model
        self._params = params
        self._start = _system(system)
        self._style: Style = "markdown"
        self._shows_speed = sys.stderr.isatty()
        self.messages = list(self._start)
        self._commands: dict[str, Callable[[str], None]] = {
            "/clear": self._clear,
            "/help": lambda text: say(HELP),
            "/?": lambda text: say(HELP),
            "/set": self._set,
            "/show": self._show,
            "/save": self._save,
            "/load": self._load,
        }

    def handle(self, message: str) -> bool:
        """Run a command or answer a message; False for the command that ends the chat."""
        message = message.strip()
        word, _, rest = message.partition(" ")
        if message in ("/exit", "/bye"):
            return False
        if word in self._commands:
            try:
                self._commands[word](rest.strip())
            except (RequestError, OSError) as error:
                say(f"error: {error}")
        elif message.startswith("/") and not rest and "\n" not in message:
            say(f"unknown command {message}; /help lists the commands")
        elif message:
            self._answer(message)
        return True

    def _answer(self, text: str) -> None:
        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            with screen(self._style) as out:
                answer = print_answer(self._llm.stream(asked, self._params), out)
        except (RequestError, GenerationError) as error:
            say(f"error: {error}")
            return
        if answer.text:  # an interrupted answer stays as far as it went: the user saw it
            self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        if self._shows_speed:
            say(f"[{answer.stats()}]")

    def _clear(self, text: str) -> None:
        self.messages = list(self._start)
        say("The conversation starts anew.")

    def _set(self, text: str) -> None:
        what, _, value = text.partition(" ")
        if what == "parameter":
            self._params = with_parameter(self._params, value)
        elif what == "system":
            before, self._start = self._start, _system(value.strip().strip('"'))
            self.messages = [*self._start, *self.messages[len(before) :]]
        elif what in _STYLES:
            self._style = _STYLES[what]
        elif what in ("verbose", "quiet"):
            self._shows_speed = what == "verbose"
        else:
            raise RequestError(
                "set what? parameter NAME VALUE, system TEXT, wordwrap, markdown, plain, verbose or quiet"
            )
        say(f"set {text}")

    def _show(self, text: str) -> None:
        given = {name: value for name, value in _given(self._params).items() if name != "output_kind"}
        say(f"model      {self._model}")
        say(f"parameters {', '.join(f'{name} {value}' for name, value in given.items()) or 'as the model has them'}")
        say(f"system     {self._start[0]['content'] if self._start else 'none'}")
        say(f"messages   {len(self.messages) - len(self._start)}")

    def _save(self, name: str) -> None:
        path = save_chat(name, SavedChat(self._model, self.messages))
        say(f"saved as {name} ({path})")

    def _load(self, name: str) -> None:
        saved = load_chat(name)
        self.messages = list(saved.messages)
        self._start = [message for message in self.messages[:1] if message["role"] == "system"]
        other = "" if saved.model == self._model else f"; it was held with {saved.model}"
        say(f"{len(self.messages) - len(self._start)} messages of {name}{other}")


def _system(text: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": text}] if text else []


def _given(params: SamplingParams) -> dict[str, Any]:
    """What differs from the defaults."""
    plain = type(params)()
    values = {name: getattr(params, name) for name in params.__struct_fields__ if not name.startswith("_")}
    return {name: value for name, value in values.items() if value != getattr(plain, name)}


def read_messages(lines: Iterator[str]) -> Iterator[str]:
    """Lines, and as one message those between two lines that begin and end with three quotation marks."""
    for line in lines:
        if not line.lstrip().startswith(SEVERAL_LINES):
            yield line
            continue
        parts = [line.lstrip().removeprefix(SEVERAL_LINES)]
        while not parts[-1].rstrip().endswith(SEVERAL_LINES):
            more = next(lines, None)
            if more is None:
                break
            parts.append(more)
        yield "\n".join(part.rstrip("\n") for part in parts).rstrip().removesuffix(SEVERAL_LINES).strip()


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
