"""Reading outputs: ids, joined events, the finish reason, and several choices at a time."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from quire.parsers.events import CallArguments, CallEnd, CallStart, Event, ReasoningDelta, TextDelta, assemble, joined
from quire.parsers.format import Tool
from quire.parsers.stream import make_parser
from quire.server.conversation.answer import AnswerReader, ChoiceReader
from quire.types.outputs import CompletionOutput, RequestOutput
from quire.types.request import FinishReason

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def reader(max_calls: int | None = None) -> ChoiceReader:
    numbers = itertools.count()
    return ChoiceReader(lambda name, index: f"{name}-{index}-{next(numbers)}", max_calls)


def output(text: str, finish_reason: FinishReason | None = "stop", tool_format: str = "hermes") -> CompletionOutput:
    """All of a completion, read."""
    parser = make_parser(tool_format, None, prompt_text="", tools=[Tool("f")])
    events = [*parser.feed(text), *parser.finish()]
    return CompletionOutput(0, text, [1], finish_reason=finish_reason, events=events)


def test_calls_get_ids_and_the_finish_reason_says_that_there_are_any() -> None:
    piece = reader().read(output(f"Well.\n{CALL}\n{CALL}"))
    assert piece.events == [
        TextDelta("Well."),
        CallStart(0, "f", "f-0-0"),
        CallArguments(0, '{"a": 1}'),
        CallEnd(0),
        CallStart(1, "f", "f-1-1"),
        CallArguments(1, '{"a": 1}'),
        CallEnd(1),
    ]
    assert piece.finish_reason == "tool_calls"


def test_other_finish_reasons_stay() -> None:
    assert reader().read(output(CALL, "length")).finish_reason == "length"
    assert reader().read(output(CALL, "abort")).finish_reason == "abort"
    assert reader().read(output("x")).finish_reason == "stop"
    # A call that is not complete is none that could be made.
    assert reader().read(output(CALL[: CALL.index("1")])).finish_reason == "stop"


def test_an_id_that_the_model_wrote_is_kept() -> None:
    said = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    )
    piece = ChoiceReader(lambda name, index: "made up").read(output(said, tool_format="kimi_k2"))
    assert [event.id for event in piece.events if isinstance(event, CallStart)] == ["functions.f:7"]


def test_calls_past_the_limit_are_left_out() -> None:
    piece = reader(max_calls=1).read(output(f"{CALL}\n{CALL}\n{CALL}"))
    assert [type(event) for event in piece.events] == [CallStart, CallArguments, CallEnd]


def test_a_completion_that_is_not_read_is_text() -> None:
    piece = reader().read(CompletionOutput(0, CALL, [1, 2], finish_reason="stop", stop_reason=7))
    assert (piece.events, piece.token_ids, piece.finish_reason, piece.stop_reason) == (
        [TextDelta(CALL)],
        [1, 2],
        "stop",
        7,
    )
    assert reader().read(CompletionOutput(0, "", [1])).events == []


def test_choices_do_not_get_into_each_others_way() -> None:
    answer = AnswerReader(reader)
    for index, event in ((1, CallStart(0, "f")), (0, CallStart(0, "g")), (1, CallEnd(0)), (0, CallEnd(0, False))):
        completion = CompletionOutput(index, "", [1], events=[event])
        answer.read(RequestOutput("r", None, [], [completion], False))
    last = [CompletionOutput(index, "", [1], finish_reason="stop", events=[]) for index in (1, 0)]
    pieces = answer.read(RequestOutput("r", None, [], last, True))
    assert [(piece.index, piece.finish_reason) for piece in pieces] == [(1, "tool_calls"), (0, "stop")]


EVENTS = st.one_of(
    st.builds(TextDelta, st.text(min_size=1)),
    st.builds(ReasoningDelta, st.text(min_size=1)),
    st.just(None),
)


@given(st.lists(EVENTS))
def test_joining_changes_nothing_but_the_number_of_events(drawn: list[Event | None]) -> None:
    events: list[Event] = []
    calls = itertools.count()
    for event in drawn:
        if event is not None:
            events.append(event)
        else:
            index = next(calls)
            events += [
                CallStart(index, "f", "i"),
                CallArguments(index, "{"),
                CallArguments(index, "}"),
                CallEnd(index),
            ]
    together = joined(events)
    assert assemble(together) == assemble(events)
    assert all(type(one) is not type(two) for one, two in itertools.pairwise(together))
