"""Structured output: what a caller may ask for (StructuredOutputsParams), and the form of it that the engine takes.

Knows names and sizes, not what makes a grammar valid: that is quire/structured.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec

from quire.types.errors import RequestError

GrammarKind = Literal["json", "regex", "choice", "grammar", "structural_tag"]

_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class GrammarError(RequestError):
    """A grammar cannot be used. `keyword` is what is wrong in it and `path` where, if that can be told."""

    def __init__(self, message: str, field: str, keyword: str | None = None, path: str | None = None) -> None:
        super().__init__(message, field)
        self.keyword = keyword
        self.path = path


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the output must be: exactly one of the first six. Names and meanings follow vLLM's class of this name."""

    json: str | dict[str, Any] | None = None
    """A JSON schema, as an object or as JSON text."""
    regex: str | None = None
    """A regular expression that the whole output matches."""
    choice: list[str] | None = None
    """Strings, one of which is the output."""
    grammar: str | None = None
    """A context-free grammar, in llguidance's form of Lark or in GBNF."""
    json_object: bool | None = None
    """Any JSON object."""
    structural_tag: str | None = None
    """Free text with constrained parts in it, as JSON text."""
    disable_any_whitespace: bool = False
    """JSON without any whitespace between its parts."""
    disable_additional_properties: bool = False
    """Objects have no properties but those that the schema names, also where it does not say so."""
    whitespace_pattern: str | None = None
    """A regular expression for the whitespace between the parts of JSON."""

    def __post_init__(self) -> None:
        given = [name for name in _CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = f"has {', '.join(given)}" if given else "is empty"
            raise RequestError(
                f"structured_outputs {found} but must have exactly one of {', '.join(_CONSTRAINTS)}",
                "structured_outputs",
            )
        if self.choice is not None and not self.choice:
            raise RequestError(
                "structured_outputs.choice is empty; give at least one string", "structured_outputs.choice"
            )
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise RequestError(
                "structured_outputs has whitespace_pattern and disable_any_whitespace; give one of them",
                "structured_outputs.whitespace_pattern",
            )

    @property
    def constraint(self) -> str:
        """The name of the one that is set."""
        return next(name for name in _CONSTRAINTS if getattr(self, name) not in (None, False))


class GrammarSource(msgspec.Struct, frozen=True, array_like=True):
    """A checked grammar in its canonical spelling: equal sources are compiled once."""

    kind: GrammarKind
    text: str
    """A schema or a structural tag as JSON, choices as a JSON list, a regular expression or a grammar as it is."""
    whitespace: str | None = None
    """For JSON: a regular expression for what may stand between its parts; "" is nothing, None the default."""

    @property
    def key(self) -> bytes:
        """Names the content: what the cache of compiled grammars is keyed by."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).digest()


class GrammarLimits(msgspec.Struct, frozen=True, array_like=True):
    """What is refused before anything is compiled, and by which backend the rest is understood."""

    backend: str = "llguidance"
    max_bytes: int = 1 << 20
    max_depth: int = 64
    compile_timeout: float = 10.0


class Vocabulary(msgspec.Struct, frozen=True):
    """What the tokens stand for. The frontend sends it once, before the first request with a grammar."""

    pieces: list[bytes]
    """The bytes of each token id of the model; empty where an id has none."""
    special_token_ids: list[int]
    """Tokens that no text stands for: a grammar reaches them by name only."""
    eos_token_ids: list[int]
    """Tokens that are allowed exactly where a grammar may end."""
