"""The builder of a response's events, for any answer in any pieces: order, content, OpenAI's published shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response as SdkResponse
from openai.types.responses import ResponseStreamEvent
from openai.types.responses.response_output_item import McpCall
from pydantic import TypeAdapter

from quire.server.conversation.blocks import BlockReader
from quire.server.openai.logprobs import ChatLogprob
from quire.server.openai.responses.events import CUT_SHORT, Event, ResponseEvents, decrypt, encrypt
from quire.server.openai.responses.protocol import (
    InputTokensDetails,
    McpProtocolError,
    McpToolInfo,
    OutputTokensDetails,
    Response,
    ResponseUsage,
)
from tests.server.answers import ANSWERS, Said, events_of, merged, unknown_fields

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
NAMESPACES = {"space__search": ("space", "search")}
REMOTE = {"loop__add": ("loop", "add")}
# The steps that an item may take, each with what may come next; deltas may repeat.
STEPS = {
    "message": ("content_part.added", "output_text.delta*", "output_text.done", "content_part.done"),
    "reasoning": ("content_part.added", "reasoning_text.delta*", "reasoning_text.done", "content_part.done"),
    "summary": (
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta*",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
    ),
    "function_call": ("function_call_arguments.delta*", "function_call_arguments.done"),
    "mcp_call": ("mcp_call.in_progress", "mcp_call_arguments.delta*", "mcp_call_arguments.done", "mcp_call.*"),
    "mcp_list_tools": ("mcp_list_tools.in_progress", "mcp_list_tools.completed"),
}
# OpenAI's service tells the first, too, and older versions of its client want the second.
NOT_IN_THE_SDK = {"Response.store", "ResponseFunctionCallArgumentsDoneEvent.name"}


def build(turns: Sequence[Sequence[Said]], cuts: Sequence[int], as_summary: bool) -> tuple[Response, list[Event]]:
    """A response over several turns, and its events."""
    response = Response(id="resp_1", created_at=1, status="in_progress", model="m", text={"format": {"type": "text"}})
    events = ResponseEvents(
        response, as_summary=as_summary, with_encrypted=True, namespaces=NAMESPACES, remote=REMOTE
    )
    made = events.begin()
    made += events.listing("loop", [McpToolInfo("add", {"type": "object"}, "Adds")])
    for turn in turns:
        events.next_turn()
        reader, told = BlockReader(), events_of(turn)
        begin = 0
        for size in [*cuts, len(told)]:
            made += events.blocks(reader.read(told[begin : begin + size]), [logprob()])
            begin += size
        made += events.blocks(reader.finish())
        for number, (index, _) in enumerate(events.waiting_calls()):
            said: dict[str, Any] = {"output": "3"} if number % 2 == 0 else {"error": McpProtocolError("no")}
            made += events.call_result(index, **said)
    response.status = "completed"
    response.usage = ResponseUsage(1, InputTokensDetails(0), 2, OutputTokensDetails(1), 3)
    made.append(events.end())
    return response, made


def logprob() -> ChatLogprob:
    return ChatLogprob(token="a", logprob=-1.0, bytes=[97], top_logprobs=[])


TURNS = st.lists(ANSWERS, min_size=1, max_size=2)
CUTS = st.lists(st.integers(0, 4), max_size=6)


@given(TURNS, CUTS, st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_answer_in_any_pieces(turns: list[list[Said]], cuts: list[int], as_summary: bool) -> None:
    response, made = build(turns, cuts, as_summary)
    final = msgspec.to_builtins(response)

    assert [event["sequence_number"] for event in made] == list(range(len(made)))
    kinds = [event["type"].removeprefix("response.") for event in made]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] == "completed"
    assert made[-1]["response"] == final
    check_items(made[2:-1], final["output"], as_summary)
    spoken = [block for turn in turns for block in merged(turn)]
    assert [(_kind(item), _text(item)) for item in final["output"][1:]] == spoken


def check_items(events: list[dict[str, Any]], output: list[dict[str, Any]], as_summary: bool) -> None:
    """Each item opens, takes its steps in order, and is closed as it stands in the response."""
    for index, item in enumerate(output):
        own = [event for event in events if event["output_index"] == index]
        kinds = [event["type"].removeprefix("response.") for event in own]
        assert (kinds[0], kinds[-1]) == ("output_item.added", "output_item.done")
        assert own[-1]["item"] == item
        assert all(event["item_id"] == item["id"] for event in own[1:-1])
        steps = STEPS["summary" if item["type"] == "reasoning" and as_summary else item["type"]]
        assert follows(kinds[1:-1], steps), kinds
        deltas = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert deltas == ("" if item["type"] == "mcp_list_tools" else _text(item))
    opened = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
    assert opened == list(range(len(output)))


def follows(kinds: Sequence[str], steps: Sequence[str]) -> bool:
    position = 0
    for step in steps:
        if step.endswith("delta*"):
            while position < len(kinds) and kinds[position] == step.removesuffix("*"):
                position += 1
        elif position < len(kinds) and kinds[position].startswith(step.removesuffix("*")):
            position += 1
        else:
            return False
    return position == len(kinds)


def as_the_sdk_knows_it(value: Any) -> Any:
    """Before its version 3 the SDK took the error of a remote call for text; there it is left out."""
    if str not in get_args(McpCall.model_fields["error"].annotation):
        return value
    if isinstance(value, list):
        return [as_the_sdk_knows_it(item) for item in value]
    if not isinstance(value, dict):
        return value
    plain = {name: as_the_sdk_knows_it(item) for name, item in value.items()}
    return plain | {"error": None} if value.get("type") == "mcp_call" else plain


@given(TURNS, CUTS, st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_event_and_object_has_the_published_shape(
    turns: list[list[Said]], cuts: list[int], as_summary: bool
) -> None:
    response, made = build(turns, cuts, as_summary)
    for event in made:
        valid = EVENT.validate_python(as_the_sdk_knows_it(event), strict=True)
        assert valid.type == event["type"]
        assert unknown_fields(valid) <= NOT_IN_THE_SDK
    whole = SdkResponse.model_validate(as_the_sdk_knows_it(msgspec.to_builtins(response)), strict=True)
    assert unknown_fields(whole) <= NOT_IN_THE_SDK


def test_a_remote_call_that_was_cut_short_has_failed() -> None:
    response, made = build([[Said("call", ('{"a": ',), "loop__add", complete=False)]], [], False)
    assert "response.mcp_call.failed" in [event["type"] for event in made]
    assert msgspec.to_builtins(response.output[1])["error"]["message"] == CUT_SHORT


@given(st.text())
def test_thinking_comes_back(text: str) -> None:
    assert decrypt(encrypt(text)) == text.encode("utf-8", "replace").decode()
    assert decrypt("not base64!") == ""


def _kind(item: dict[str, Any]) -> str:
    return {"message": "text", "reasoning": "reasoning"}.get(item["type"], "call")


def _text(item: dict[str, Any]) -> str:
    if item["type"] in ("function_call", "mcp_call"):
        return str(item["arguments"])
    parts = item.get("content") or item.get("summary") or []
    return "".join(part["text"] for part in parts)
