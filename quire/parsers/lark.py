"""Writes llguidance's dialect of Lark: literals with special tokens in them, JSON schemas, text up to a marker."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

ANY_TEXT = "/(?s:.*)/"
# Templates write JSON with these separators, and models that were trained on them should be held to nothing else.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Lark:
    """One grammar in the making. `special_tokens` maps those of the tokenizer to their ids."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special_tokens = special_tokens
        spelled = "|".join(re.escape(token) for token in sorted(special_tokens, key=len, reverse=True))
        self._split = re.compile(f"({spelled})") if spelled else None
        self._rules: list[str] = []

    def literal(self, text: str) -> str:
        """Exactly this text, special tokens as such."""
        parts = [text] if self._split is None else self._split.split(text)
        return " ".join(self._terminal(part) for part in parts if part) or '""'

    def _terminal(self, part: str) -> str:
        token_id = self._special_tokens.get(part)
        return json.dumps(part) if token_id is None else f"<[{token_id}]>"

    def is_special(self, text: str) -> bool:
        return text in self._special_tokens

    def schema(self, schema: Mapping[str, Any]) -> str:
        """JSON that obeys the schema, in one line."""
        return f"%json {json.dumps({**schema, 'x-guidance': _JSON_STYLE})}"

    def rule(self, body: str, options: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """A rule that is one regular expression."""
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def until(self, markers: Sequence[str], text: str = ANY_TEXT) -> str:
        """Any text up to the first of these markers, and the marker."""
        special = [f"({text} {self.literal(marker)})" for marker in markers if self.is_special(marker)]
        plain = [
            self.rule(text, f"[suffix={json.dumps(marker)}]") for marker in markers if not self.is_special(marker)
        ]
        return choice(special + plain)

    def text(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join(("%llguidance {}", f"start: {start}", *self._rules, ""))


def choice(options: Sequence[str]) -> str:
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def optional(body: str) -> str:
    return f"({body})?"


def many(body: str) -> str:
    return f"({body})*"


def regex(pattern: str) -> str:
    """A pattern between slashes."""
    return "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern) + "/"
