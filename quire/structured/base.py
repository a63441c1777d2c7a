"""What a backend for structured output offers: grammars that are compiled once, and a matcher for each request.

A matcher is at the end of a request's known tokens and gives a mask of the tokens that may come next. Knows token ids
and the bytes they stand for; knows no request and no tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from quire.types.masks import Masks
from quire.types.structured import GrammarSource, Vocabulary

# Formats that some backend enforces. By the standard, any other is an annotation.
FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})


@dataclass(frozen=True)
class SchemaSupport:
    """Which parts of JSON Schema a backend enforces; other keywords are refused or are annotations."""

    keywords: frozenset[str]
    formats: frozenset[str]
    combines: bool = True
    """Whether keywords that stand side by side are all enforced, also without a `type`."""


class Matcher(ABC):
    """The state of one request. Used by one thread at a time."""

    @abstractmethod
    def accept(self, token_ids: Sequence[int]) -> bool:
        """Advance over these tokens. False if the grammar does not allow them: `error` says why."""

    @abstractmethod
    def try_accept(self, token_id: int) -> bool:
        """Go on over a token that may not hold. False, changing nothing, if the grammar does not allow it."""

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens, which `try_accept` went over."""

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether nothing may follow, so that the output has to end here."""

    @property
    @abstractmethod
    def error(self) -> str | None:
        """Why this matcher cannot go on, if so."""

    @property
    def is_too_complex(self) -> bool:
        """Whether the error is that the grammar exceeds a limit of the library."""
        return False


class Grammar(ABC):
    """A compiled grammar. Shared by requests; may be used from any thread."""

    @abstractmethod
    def matcher(self) -> Matcher:
        """A new matcher at the beginning. Cheap."""


class Backend(ABC):
    """Compiles grammars for one vocabulary and computes masks. Built on first use, off the engine's loop."""

    schema_support: ClassVar[SchemaSupport]
    package: ClassVar[str | None] = None  # which it imports when it is built

    @abstractmethod
    def __init__(self, vocabulary: Vocabulary) -> None:
        """May block for a second and hold the interpreter's lock."""

    @staticmethod
    @abstractmethod
    def check_regex(pattern: str) -> str | None:
        """What is wrong with a regular expression, None if nothing. Needs no vocabulary; quick."""

    @staticmethod
    @abstractmethod
    def check_text(rule: Mapping[str, Any], text: str) -> bool | None:
        """Whether a text obeys a schema of `pattern` or `format` alone; None if that is not known. Quick."""

    @abstractmethod
    def compile(self, source: GrammarSource) -> Grammar:
        """Blocks, without the interpreter's lock while it matters. GrammarError if the source cannot be used."""

    @abstractmethod
    def fill(self, matchers: Sequence[Matcher], masks: Masks) -> None:
        """Write the mask of each matcher into its row; end-of-sequence is allowed where the output may end.

        Blocks without the interpreter's lock. A matcher that fails has its `error` set and any mask.
        """
