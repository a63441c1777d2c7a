"""Parser: argparse that takes flags as they are written, and answers a mistake with one line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

EXIT_USAGE = 2
_MOST_SUGGESTIONS = 3


class Parser(argparse.ArgumentParser):
    """Subcommands get the same class."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(  # type: ignore[override]  # the overloads of the base class say no more than this
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Refuse unknown arguments here: only the parser of the subcommand knows its flags."""
        known, left = super().parse_known_args(args, namespace)
        for word in left:
            if word.startswith("-"):
                self.error(f"unknown flag {word.partition('=')[0]}{self._suggestion(word.partition('=')[0])}")
        if left:
            self.error(f"unexpected argument {left[0]!r}")
        return known, left

    def error(self, message: str) -> NoReturn:
        """Print the error alone, without the forty lines of usage."""
        separator = " " if message.endswith("?") else "; "
        self.exit(EXIT_USAGE, f"error: {message}{separator}`{self.prog} --help` lists the flags\n")

    def _suggestion(self, word: str) -> str:
        known = list(self._option_string_actions)
        prefixed = [flag for flag in known if flag.startswith(word)]
        likely = list(dict.fromkeys([*get_close_matches(word, known, n=1), *prefixed]))
        return f"; did you mean {' or '.join(likely[:_MOST_SUGGESTIONS])}?" if likely else ""
