"""An answer as a sequence of blocks, each opened once, filled, and closed: thinking, text, or a call.

What Responses calls output items and Messages content blocks. Knows events; the endpoints give blocks their JSON.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from quire.parsers.events import CallArguments, CallEnd, CallStart, Event, ReasoningDelta

BlockKind = Literal["text", "reasoning", "call"]


@dataclass(frozen=True, slots=True)
class BlockStart:
    """Block number `position` opens. A call has a name and an id."""

    position: int
    kind: BlockKind
    name: str = ""
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class BlockDelta:
    """More of the block that is open: text, or a piece of a call's JSON."""

    position: int
    kind: BlockKind
    text: str


@dataclass(frozen=True, slots=True)
class BlockEnd:
    """The open block ends. `complete` is false if the answer ended within it."""

    position: int
    kind: BlockKind
    complete: bool = True


BlockEvent = BlockStart | BlockDelta | BlockEnd


class BlockReader:
    """Turns events into blocks, one open at a time. White space alone makes no block.

    Events in any grouping give the same blocks; only how their text is cut into deltas differs.
    """

    __slots__ = ("_blank", "_kind", "_position")

    def __init__(self) -> None:
        self._position = -1
        self._kind: BlockKind | None = None
        self._blank: tuple[BlockKind | None, str] = (None, "")  # white space that waits for text of its kind

    def read(self, events: Iterable[Event]) -> list[BlockEvent]:
        out: list[BlockEvent] = []
        for event in events:
            if isinstance(event, CallStart):
                self._open(out, "call", event.name, event.id or "")
            elif isinstance(event, CallArguments):
                out.append(BlockDelta(self._position, "call", event.json_fragment))
            elif isinstance(event, CallEnd):
                self._close(out, event.complete)
            else:
                self._text(out, "reasoning" if isinstance(event, ReasoningDelta) else "text", event.text)
        return out

    def finish(self, cut_short: bool = False) -> list[BlockEvent]:
        """Close what is open. A call that is still open is never complete, anything else unless it was cut short."""
        out: list[BlockEvent] = []
        self._close(out, self._kind != "call" and not cut_short)
        return out

    def _text(self, out: list[BlockEvent], kind: BlockKind, text: str) -> None:
        if not text:
            return
        if self._kind != kind:
            if self._kind is not None:
                self._close(out)
            waiting, blank = self._blank
            text = blank + text if waiting == kind else text
            if not text.strip():
                self._blank = (kind, text)
                return
            self._open(out, kind)
        out.append(BlockDelta(self._position, kind, text))

    def _open(self, out: list[BlockEvent], kind: BlockKind, name: str = "", call_id: str = "") -> None:
        self._close(out)
        self._position += 1
        self._kind = kind
        out.append(BlockStart(self._position, kind, name, call_id))

    def _close(self, out: list[BlockEvent], complete: bool = True) -> None:
        if self._kind is not None:
            out.append(BlockEnd(self._position, self._kind, complete))
        self._kind, self._blank = None, (None, "")


@dataclass(slots=True)
class Block:
    """A whole block."""

    kind: BlockKind
    text: str = ""  # for a call its arguments as JSON, or as much of them as came
    name: str = ""
    call_id: str = ""
    complete: bool = True


def blocks_of(events: Iterable[BlockEvent]) -> list[Block]:
    """The blocks that the events of one answer add up to."""
    blocks: list[Block] = []
    for event in events:
        if isinstance(event, BlockStart):
            blocks.append(Block(event.kind, name=event.name, call_id=event.call_id))
        elif isinstance(event, BlockDelta):
            blocks[event.position].text += event.text
        else:
            blocks[event.position].complete = event.complete
    return blocks
