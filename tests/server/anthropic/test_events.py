"""The builder of a message's events, for any answer in any pieces: order, content, Anthropic's published shapes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
from anthropic.types import Message as SdkMessage
from anthropic.types import RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from quire.server.anthropic.events import SIGNATURE, content_block, stop_info, stream_events
from quire.server.anthropic.protocol import Message, MessageDelta, MessageStart, MessageStop, Usage
from quire.server.conversation.blocks import BlockReader, blocks_of
from tests.server.answers import ANSWERS, Said, events_of, merged, unknown_fields

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
TYPES = {"text": "text", "reasoning": "thinking", "call": "tool_use"}
DELTAS = {"text": ["text_delta"], "thinking": ["thinking_delta", "signature_delta"], "tool_use": ["input_json_delta"]}
# Cut into pieces that are no JSON in themselves, as models say them.
ARGUMENTS = st.sampled_from([(), ("{}",), ('{"a"', ": [1, ", '"ö"]}'), ('{"a": {"b"', ": null}}")])


def with_json(answer: list[Said], arguments: tuple[str, ...]) -> list[Said]:
    """The same answer with calls whose arguments are whole."""
    return [Said("call", arguments, said.name, said.complete) if said.kind == "call" else said for said in answer]


def build(answer: Sequence[Said], cuts: Sequence[int], show: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole message, and the events of the same message as a stream."""
    told, reader, begin = events_of(answer), BlockReader(), 0
    blocks = []
    for size in [*cuts, len(told)]:
        blocks += reader.read(told[begin : begin + size])
        begin += size
    blocks += reader.finish()
    usage = Usage(3, 3, 2)
    stop = stop_info("stop", None, 3, 10)
    content = [content_block(block, show) for block in blocks_of(blocks)]
    whole = Message("msg_1", "m", content, usage)
    whole.stop_reason, whole.stop_sequence = stop.stop_reason, stop.stop_sequence
    events = [MessageStart(Message("msg_1", "m", [], usage))]
    stream = [event for block in blocks for event in stream_events(block, show)]
    both = [whole, [*events, *stream, MessageDelta(stop, usage), MessageStop()]]
    as_sent: tuple[dict[str, Any], list[dict[str, Any]]] = tuple(json.loads(msgspec.json.encode(both)))
    return as_sent


@given(ANSWERS, ARGUMENTS, st.lists(st.integers(0, 4), max_size=6), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_answer_in_any_pieces(
    answer: list[Said], arguments: tuple[str, ...], cuts: list[int], show: bool
) -> None:
    answer = with_json(answer, arguments)
    whole, events = build(answer, cuts, show)
    assert [block["type"] for block in whole["content"]] == [TYPES[kind] for kind, _ in merged(answer)]
    for index, block in enumerate(whole["content"]):
        own = [event for event in events if event.get("index") == index]
        assert [own[0]["type"], own[-1]["type"]] == ["content_block_start", "content_block_stop"]
        deltas = [event["delta"] for event in own[1:-1]]
        assert all(delta["type"] in DELTAS[block["type"]] for delta in deltas)
        if block["type"] == "tool_use":
            assert own[0]["content_block"] == block | {"input": {}}
            assert json.loads("".join(delta["partial_json"] for delta in deltas) or "{}") == block["input"]
        elif block["type"] == "thinking":
            assert deltas[-1] == {"type": "signature_delta", "signature": SIGNATURE}
            assert "".join(delta["thinking"] for delta in deltas[:-1]) == block["thinking"]
            assert show or block["thinking"] == ""
        else:
            assert "".join(delta["text"] for delta in deltas) == block["text"]
    places = [event["index"] for event in events if "index" in event]
    assert places == sorted(places)


@given(ANSWERS, ARGUMENTS, st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_event_and_object_has_the_published_shape(
    answer: list[Said], arguments: tuple[str, ...], show: bool
) -> None:
    whole, events = build(with_json(answer, arguments), [1, 2], show)
    for event in events:
        valid = EVENT.validate_python(event, strict=True)
        assert valid.type == event["type"]
        assert unknown_fields(valid) == set()
    assert unknown_fields(SdkMessage.model_validate(whole, strict=True)) == set()
