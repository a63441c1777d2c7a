"""The interface of output parsers, and the parser for plain text."""

from __future__ import annotations

from abc import ABC, abstractmethod

from quire.parsers.events import Event, TextDelta


class OutputParser(ABC):
    """One per output (per choice). Not thread-safe; never raises, whatever the model writes."""

    @property
    @abstractmethod
    def is_thinking(self) -> bool:
        """Whether what was read so far ends inside of thinking."""

    @abstractmethod
    def feed(self, text: str) -> list[Event]:
        """Take in the next piece of text. Only what may turn out to be part of a marker is held back."""

    @abstractmethod
    def finish(self) -> list[Event]:
        """The output has ended, complete or cut short: return what was held back and end an open call."""


class PlainParser(OutputParser):
    """All of the output is text."""

    @property
    def is_thinking(self) -> bool:
        return False

    def feed(self, text: str) -> list[Event]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[Event]:
        return []
