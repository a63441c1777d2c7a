"""How one call is written between its markers: reading it piece by piece, writing it, and the grammar of it."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

from quire.parsers.format import Tool
from quire.parsers.lark import Lark


class Status(enum.Enum):
    MORE = "more"  # what came so far is the beginning of a call
    DONE = "done"  # the call is complete
    BAD = "bad"  # it is no call, from the returned position on


class CallSink(Protocol):
    """Where a reader puts what it has read of a call."""

    def start(self, name: str, call_id: str | None = None) -> bool:
        """The call's name is known. False if there is no such tool and the format would mistake text for calls."""

    def arguments(self, fragment: str) -> None:
        """More of the arguments' JSON."""


class Reader(ABC):
    """Reads one call."""

    status: Status = Status.MORE
    complete: bool = False  # the arguments that were passed on are a whole JSON object
    unsaid: str = ""  # what was read after them, for the case that it turns out not to belong to a call

    @abstractmethod
    def read(self, text: str, position: int, final: bool) -> int:
        """Read on from `position` and return where to go on; `final` says that nothing will follow.

        The caller gives the same text again, with more behind it; what lies before the returned position
        may be gone, and positions move accordingly.
        """


class Codec(ABC):
    """One way to write a name and arguments."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The strings that stand inside of a call and are none of its own words."""
        return tuple(value for value in vars(self).values() if isinstance(value, str))

    @abstractmethod
    def begins(self, char: str) -> bool:
        """Whether a call can begin with this character."""

    @abstractmethod
    def reader(self, sink: CallSink, tools: Mapping[str, Tool]) -> Reader:
        """A reader for one call."""

    @abstractmethod
    def render(self, name: str, arguments: Mapping[str, Any], index: int) -> str:
        """A call as a well-behaved model writes it."""

    @abstractmethod
    def grammar(self, tool: Tool, lark: Lark) -> str:
        """The calls of this tool whose arguments obey its schema. RequestError if that cannot be said."""
