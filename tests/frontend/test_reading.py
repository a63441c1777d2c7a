"""Completions read as events: the same however tokens arrive, with stop strings, limits and unfinished characters."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.input_processor import InputProcessor
from quire.frontend.mailbox import merge_deltas
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.reading import Reading, make_reader
from quire.parsers.events import assemble, joined
from quire.parsers.format import Tool
from quire.parsers.stream import make_parser
from quire.types.events import CallEnd, TextDelta
from quire.types.messages import EngineInfo
from quire.types.outputs import CompletionOutput, EngineOutput
from quire.types.sampling import SamplingParams
from tests.frontend.fake_client import MAX_MODEL_LEN, TOKENIZER, VOCAB_SIZE

INPUTS = InputProcessor(TOKENIZER, EngineInfo(VOCAB_SIZE, MAX_MODEL_LEN, 16, 64, 8))
READING = Reading(tool_format="hermes", reasoning_format="qwen3", prompt_text="", tools=(Tool("f"),))
CALL = '<tool_call>{"name": "f", "arguments": {"a": "\u2600"}}</tool_call>'


def read(said: bytes, sizes: list[int], one_call: bool = False, **params: Any) -> tuple[CompletionOutput, list[str]]:
    """The completion put together, and what the engine is told to abort; `sizes` are of steps, again and again."""
    processor = OutputProcessor(TOKENIZER)
    request = INPUTS.process("p", SamplingParams(**params), request_id="r")
    processor.add(request, dataclasses.replace(READING, one_call=one_call))
    outputs, aborts, at = [], [], 0
    for size in itertools.cycle(sizes):
        if not len(processor):
            break
        last = at + size >= len(said)
        step = EngineOutput("r", list(said[at : at + size]), finish_reason="length" if last else None)
        done = processor.process([step])
        outputs += done.outputs
        aborts += done.aborts
        at += size
    (completion,) = merge_deltas(outputs).outputs
    return completion, aborts


ANSWERS = st.lists(
    st.sampled_from(["<think>", "</think>", CALL, "so \u2600", "\n", "stop", "<tool_call>{", "</tool_call>"]),
    max_size=6,
).map("".join)


@given(
    answer=ANSWERS,
    cut=st.integers(0, 3),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    one_call=st.booleans(),
    stop=st.sampled_from([None, "stop", "\u2600"]),
    min_tokens=st.sampled_from([0, 0, 30]),
)
def test_steps_of_any_size_come_to_the_same(
    answer: str, cut: int, sizes: list[int], one_call: bool, stop: str | None, min_tokens: int
) -> None:
    said = answer.encode()
    said = said[: len(said) - cut] or b"x"
    params: dict[str, Any] = {"stop": stop, "min_tokens": min_tokens, "max_tokens": 400}
    whole, _ = read(said, [1], one_call, output_kind="final_only", **params)
    parts, _ = read(said, sizes, one_call, output_kind="delta", **params)
    assert joined(parts.events or []) == joined(whole.events or [])
    for name in ("text", "token_ids", "finish_reason", "stop_reason", "num_reasoning_tokens"):
        assert getattr(parts, name) == getattr(whole, name)
    if not one_call:
        one_shot = make_parser("hermes", "qwen3", prompt_text="", tools=READING.tools)
        assert joined(whole.events or []) == joined([*one_shot.feed(whole.text), *one_shot.finish()])


def test_the_first_call_ends_the_completion() -> None:
    completion, aborts = read(f"Well. {CALL} and {CALL}".encode(), [1], one_call=True, output_kind="delta")
    assert completion.finish_reason == "stop"
    assert aborts == ["r"]
    assert completion.text.endswith("</tool_call>")
    assert (completion.events or [])[-1] == CallEnd(0)
    assert assemble(completion.events or []).text == "Well."


def test_what_the_same_token_says_after_the_call_is_left_out() -> None:
    """Tokens of bytes cannot show it, so the parser is given more than one at a time."""
    reader = make_reader(dataclasses.replace(READING, one_call=True))
    assert reader is not None
    assert reader.add(f"{CALL} and more")
    reader.end_at_call()
    reader.finish("rest")
    assert reader.take(delta=True)[-1] == CallEnd(0)
    assert reader.take(delta=True) == []


def test_cumulative_outputs_hold_all_events() -> None:
    processor = OutputProcessor(TOKENIZER)
    processor.add(INPUTS.process("p", SamplingParams(output_kind="cumulative"), request_id="r"), READING)
    events = []
    for text in (b"a", b"b"):
        (output,) = processor.process([EngineOutput("r", list(text))]).outputs
        events.append(output.outputs[0].events)
    assert events == [[TextDelta("a")], [TextDelta("a"), TextDelta("b")]]


def test_a_completion_that_is_all_text_has_no_reader() -> None:
    assert make_reader(None) is None
    assert make_reader(dataclasses.replace(READING, reasoning_format=None, parse_tools=False)) is None
