"""Blocks: one open at a time, positions without gaps, and the same blocks however the events were grouped."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.parsers.events import CallArguments, CallEnd, CallStart, Event, ReasoningDelta, TextDelta
from quire.server.conversation.blocks import (
    Block,
    BlockDelta,
    BlockEnd,
    BlockEvent,
    BlockReader,
    BlockStart,
    blocks_of,
)

texts = st.text("ab \n", min_size=1, max_size=6)


@st.composite
def turns(draw: st.DrawFn) -> list[Event]:
    """Any mix of thinking, text and calls, the last call perhaps cut short."""
    events: list[Event] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(("text", "reasoning", "call")), max_size=6)):
        if kind == "text":
            events.append(TextDelta(draw(texts)))
        elif kind == "reasoning":
            events.append(ReasoningDelta(draw(texts)))
        else:
            events += [CallStart(calls, "f", f"call_{calls}"), CallArguments(calls, "{}"), CallEnd(calls)]
            calls += 1
    if draw(st.booleans()):
        events += [CallStart(calls, "g", "last"), CallArguments(calls, '{"a')]
        if draw(st.booleans()):
            events.append(CallEnd(calls, complete=False))
    return events


def pieces_of(events: list[Event]) -> list[Event]:
    """The same events letter by letter."""
    pieces: list[Event] = []
    for event in events:
        if isinstance(event, TextDelta):
            pieces += [TextDelta(letter) for letter in event.text]
        elif isinstance(event, ReasoningDelta):
            pieces += [ReasoningDelta(letter) for letter in event.text]
        elif isinstance(event, CallArguments):
            pieces += [CallArguments(event.index, letter) for letter in event.json_fragment]
        else:
            pieces.append(event)
    return pieces


def read(events: list[Event], one_by_one: bool) -> list[BlockEvent]:
    reader = BlockReader()
    groups = [[event] for event in events] if one_by_one else [events]
    return [found for group in groups for found in reader.read(group)] + reader.finish()


@given(turns())
def test_blocks_open_and_close_one_after_the_other(events: list[Event]) -> None:
    open_kind: str | None = None
    position = -1
    for found in read(events, one_by_one=False):
        if isinstance(found, BlockStart):
            assert open_kind is None
            position += 1
            open_kind = found.kind
        assert found.position == position
        assert found.kind == open_kind
        if isinstance(found, BlockDelta):
            assert found.text
        if isinstance(found, BlockEnd):
            open_kind = None
    assert open_kind is None


@given(turns())
def test_grouping_changes_no_block(events: list[Event]) -> None:
    assert blocks_of(read(events, one_by_one=False)) == blocks_of(read(pieces_of(events), one_by_one=True))


@given(turns())
def test_only_white_space_is_left_out(events: list[Event]) -> None:
    blocks = blocks_of(read(events, one_by_one=False))
    for kind, wanted in (("text", TextDelta), ("reasoning", ReasoningDelta)):
        said = "".join(event.text for event in events if isinstance(event, wanted))
        kept = "".join(block.text for block in blocks if block.kind == kind)
        assert kept.split() == said.split() or kept.replace(" ", "").replace("\n", "") == said.replace(
            " ", ""
        ).replace("\n", "")
        assert all(block.text.strip() for block in blocks if block.kind == kind)


def test_a_call_that_was_cut_short_says_so() -> None:
    events: list[Event] = [TextDelta("Well"), CallStart(0, "f", "id"), CallArguments(0, '{"a"')]
    assert blocks_of(read(events, one_by_one=True)) == [
        Block("text", "Well"),
        Block("call", '{"a"', "f", "id", complete=False),
    ]
