"""Parser: argparse that takes flags as they are written, and answers a mistake with one line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from copy import copy
from difflib import get_close_matches
from typing import Any, NoReturn

EXIT_USAGE = 2
_MOST_SUGGESTIONS = 3
_PAIR = re.compile(r"[^=/]+=|\{")  # NAME=VALUE, or JSON: no path of a model
_MOST_FLAGS = 40  # that --help explains one by one
ENGINE_FLAGS = ("--model", "--max-model-len", "--max-num-seqs", "--quantization", "--kv-cache-memory", "--device")


class Parser(argparse.ArgumentParser):
    """Subcommands get the same class."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.common: tuple[str, ...] = ()
        """The flags that --help explains, where there are too many for one reading; --help-all explains all."""
        self.words: str | None = None
        """Where words go that stand between flags: argparse takes those before the first flag only."""
        self.listing: str | None = None
        """What --help says instead of the list of arguments."""
        self.spreads = False
        """Whether a flag that may be given several times takes several words, where those cannot be the model."""

    def format_help(self) -> str:
        return self._short_help() if self.common or self.listing else super().format_help()

    def format_all_help(self) -> str:
        return super().format_help()

    def shorten_help(self) -> None:
        """Call it after the flags were added: where they are many, --help explains the common ones, --help-all all.

        A command that does not name its common flags has its own ones, and the settings in ENGINE_FLAGS.
        """
        if not self.common and len(self._get_optional_actions()) > _MOST_FLAGS:
            groups = [group for group in self._action_groups if (group.title or "").endswith(" settings")]
            settings = {action for group in groups for action in group._group_actions}
            own = [action for action in self._get_optional_actions() if action not in settings]
            flags = [action.option_strings[-1] for action in own if action.help is not argparse.SUPPRESS]
            known = self._option_string_actions
            self.common = (*flags, *(flag for flag in ENGINE_FLAGS if flag in known and flag not in flags))
        if self.common:
            self.add_argument("--help-all", action=_HelpAll, nargs=0, help="explain all flags, and exit")

    def _short_help(self) -> str:
        formatter = self._get_formatter()
        positional = [f"[{action.metavar}]" for action in self._get_positional_actions() if action.metavar]
        usage = self.usage or " ".join([self.prog, *positional, "[flags]"])
        formatter.add_usage(usage, [], [])
        formatter.add_text(self.description)
        if self.listing:
            return f"{formatter.format_help()}\n{self.listing}\n"
        formatter.start_section("arguments")
        formatter.add_arguments(self._get_positional_actions())
        formatter.end_section()
        flags = [self._option_string_actions[flag] for flag in self.common]
        formatter.start_section("flags that are often needed")
        formatter.add_arguments([_in_short(flag) for flag in flags])
        formatter.end_section()
        formatter.add_text(f"`{self.prog} --help-all` explains all {len(self._get_optional_actions())} flags.")
        return formatter.format_help()

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            likely = get_close_matches(str(value), known, n=1)
            hint = f"did you mean {likely[0]}?" if likely else f"choose from {', '.join(known)}"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}; {hint}")

    def parse_known_args(  # type: ignore[override]  # the overloads of the base class say no more than this
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Refuse unknown arguments here: only the parser of the subcommand knows its flags."""
        known, left = super().parse_known_args(self._spread(args) if self.spreads and args else args, namespace)
        for word in left:
            if word.startswith("-") and word != "-" and " " not in word:
                self.error(f"unknown flag {word.partition('=')[0]}{self._suggestion(word.partition('=')[0])}")
        if self.words is not None:
            setattr(known, self.words, [*getattr(known, self.words), *left])
            return known, []
        if left:
            hint = ""
            if self.spreads and (flag := next((word for word in args or () if word in self._repeatable()), None)):
                hint = f"; the model comes first where {flag} has several: {self.prog} MODEL {flag} A B"
            self.error(f"unexpected argument {left[0]!r}{hint}")
        return known, left

    def _repeatable(self) -> list[str]:
        actions = self._option_string_actions.items()
        return [flag for flag, action in actions if isinstance(action, argparse._AppendAction)]

    def _spread(self, words: Sequence[str]) -> list[str]:
        """`--flag a b` as `--flag a --flag b`: if the model is named before, or by --model, or if b is NAME=VALUE."""
        is_named = words[0][:1] != "-" or any(word.partition("=")[0] == "--model" for word in words)
        repeatable, found, flag, has_value = self._repeatable(), list[str](), "", False
        for word in words:
            if word.startswith("-"):
                flag, _, value = word.partition("=")
                has_value = bool(value)
            elif has_value and flag in repeatable:
                if is_named or _PAIR.match(word):
                    found.append(flag)
                else:
                    flag = ""  # this is the model
            found.append(word)
            has_value = has_value or not word.startswith("-")
        return found

    def error(self, message: str) -> NoReturn:
        """Print the error alone, without the forty lines of usage."""
        separator = " " if message.endswith("?") else "; "
        self.exit(EXIT_USAGE, f"error: {message}{separator}`{self.prog} --help` lists the flags\n")

    def _suggestion(self, word: str) -> str:
        known = list(self._option_string_actions)
        prefixed = [flag for flag in known if flag.startswith(word)]
        likely = list(dict.fromkeys([*get_close_matches(word, known, n=1), *prefixed]))
        return f"; did you mean {' or '.join(likely[:_MOST_SUGGESTIONS])}?" if likely else ""


def _in_short(flag: argparse.Action) -> argparse.Action:
    """With the first sentence of its help, and its default."""
    short = copy(flag)
    first, *rest = re.split(r"(?<=[.]) (?=[A-Z])", flag.help or "")
    short.help = " ".join([first, *(text for text in rest if text.startswith("Default: "))])
    return short


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, Parser)
        print(parser.format_all_help(), end="")
        parser.exit()
