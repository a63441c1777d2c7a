from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.input_processor import InputProcessor
from quire.frontend.mailbox import merge_deltas
from quire.frontend.output_processor import OutputProcessor, ProcessedOutputs
from quire.types.errors import RequestError
from quire.types.messages import EngineInfo
from quire.types.outputs import CompletionOutput, EngineOutput, RequestOutput
from quire.types.sampling import OutputKind, SamplingParams
from tests.frontend.fake_client import EOS, MAX_MODEL_LEN, TOKENIZER, VOCAB_SIZE, logprobs_of

INPUTS = InputProcessor(TOKENIZER, EngineInfo(VOCAB_SIZE, MAX_MODEL_LEN, 16, 64, 8))
KINDS: list[OutputKind] = ["cumulative", "delta", "final_only"]


def start(prompt: Any = "p", request_id: str = "r", **params: Any) -> OutputProcessor:
    processor = OutputProcessor(TOKENIZER)
    processor.add(INPUTS.process(prompt, SamplingParams(**params), request_id=request_id))
    return processor


def said(text: str | bytes, request_id: str = "r", **fields: Any) -> EngineOutput:
    return EngineOutput(request_id, list(text.encode() if isinstance(text, str) else text), **fields)


def feed(processor: OutputProcessor, *outputs: EngineOutput) -> list[RequestOutput]:
    """One output per step."""
    return [output for step in outputs for output in processor.process([step]).outputs]


def split(data: list[int], sizes: Iterator[int]) -> list[list[int]]:
    parts, begin = [], 0
    while begin < len(data):
        size = next(sizes)
        parts.append(data[begin : begin + size])
        begin += size
    return parts


def completion(output: RequestOutput) -> CompletionOutput:
    (only,) = output.outputs
    return only


def test_cumulative_outputs_hold_everything_so_far() -> None:
    outputs = feed(start(), said("Hel"), said("lo"), said(b"!", finish_reason="length"))
    assert [completion(o).text for o in outputs] == ["Hel", "Hello", "Hello!"]
    assert [completion(o).token_ids for o in outputs] == [list(b"Hel"), list(b"Hello"), list(b"Hello!")]
    assert [o.finished for o in outputs] == [False, False, True]
    assert (outputs[-1].prompt, outputs[-1].prompt_token_ids) == ("p", list(b"p"))
    assert completion(outputs[-1]).finish_reason == "length"


def test_deltas_hold_what_is_new() -> None:
    outputs = feed(start(output_kind="delta"), said("Hel"), said("lo", finish_reason="length"))
    assert [(completion(o).text, completion(o).token_ids) for o in outputs] == [
        ("Hel", list(b"Hel")),
        ("lo", list(b"lo")),
    ]


@given(
    st.integers(1, 6), st.lists(st.integers(1, 4), min_size=1, max_size=12), st.sampled_from(["cumulative", "delta"])
)
def test_outputs_wait_for_the_interval(interval: int, sizes: list[int], kind: OutputKind) -> None:
    processor = start(output_kind=kind, stream_interval=interval)
    *steps, last = [said("x" * size) for size in sizes]
    last = msgspec.structs.replace(last, finish_reason="length")
    outputs = feed(processor, *steps, last)
    counts = [len(completion(output).token_ids) for output in outputs]
    if kind == "cumulative":
        counts = [after - before for before, after in itertools.pairwise([0, *counts])]
    assert sum(counts) == sum(sizes)
    assert counts[0] == sizes[0], "the first comes at once"
    assert all(count >= interval for count in counts[1:-1])
    assert all(count < interval + 4 for count in counts[1:])
    assert outputs[-1].finished


def test_a_stop_string_ends_the_wait_for_the_interval() -> None:
    processor = start(output_kind="delta", stream_interval=100, stop=["!"])
    outputs = feed(processor, said("a"), said("b"), said("c!"))
    assert [completion(output).text for output in outputs] == ["a", "bc"]
    assert outputs[-1].finished


def test_a_repetition_says_what_it_is() -> None:
    (output,) = feed(start(), said("abab", finish_reason="repetition"))
    assert completion(output).text == "abab"
    assert (completion(output).finish_reason, completion(output).stop_reason) == ("repetition", "repetition_detected")


def test_final_only_says_nothing_before_the_end() -> None:
    (output,) = feed(start(output_kind="final_only"), said("Hel"), said("lo", finish_reason="length"))
    assert (completion(output).text, output.finished) == ("Hello", True)


def test_the_end_token_is_a_token_but_not_text() -> None:
    (output,) = feed(start(skip_special_tokens=False), said("Hi"))
    assert completion(output).text == "Hi"
    end = EngineOutput("r", [*b"Hi", EOS], finish_reason="stop")
    (output,) = feed(start(skip_special_tokens=False), end)
    assert (completion(output).text, completion(output).token_ids) == ("Hi", [*b"Hi", EOS])
    assert (completion(output).finish_reason, completion(output).stop_reason) == ("stop", None)


def test_a_stop_token_shows_when_asked_for() -> None:
    end = EngineOutput("r", list(b"Hi."), finish_reason="stop", stop_reason=ord("."))
    (hidden,) = feed(start(stop_token_ids=[ord(".")]), end)
    (shown,) = feed(start(stop_token_ids=[ord(".")], include_stop_str_in_output=True), end)
    assert (completion(hidden).text, completion(shown).text) == ("Hi", "Hi.")
    assert completion(shown).stop_reason == ord(".")
    eos = EngineOutput("r", [*b"Hi", EOS], finish_reason="stop")
    (output,) = feed(start(include_stop_str_in_output=True), eos)
    assert completion(output).text == "Hi"  # a special token, which is skipped


texts = st.text(st.sampled_from("abcé€😀 \n") | st.characters(exclude_categories=["Cs"]), max_size=30)
sizes_of_chunks = st.lists(st.integers(1, 5), min_size=1, max_size=6).map(itertools.cycle)


@given(texts, sizes_of_chunks, st.sampled_from(["length", "stop"]))
def test_deltas_join_to_the_final_text_for_any_chunking(text: str, sizes: Iterator[int], reason: Any) -> None:
    tokens = [*text.encode(), *([EOS] if reason == "stop" else [])] or [EOS]
    parts = split(tokens, sizes)
    steps = [EngineOutput("r", part) for part in parts[:-1]]
    steps.append(EngineOutput("r", parts[-1], finish_reason=reason))
    deltas = feed(start(output_kind="delta"), *steps)
    (final,) = feed(start(output_kind="final_only"), *steps)
    *_, cumulative = feed(start(output_kind="cumulative"), *steps)
    joined = merge_deltas(deltas)
    assert "".join(completion(d).text for d in deltas) == text
    assert completion(final) == completion(cumulative) == completion(joined)
    assert [o.finished for o in (final, cumulative, joined)] == [True] * 3
    assert completion(final).token_ids == tokens


@given(
    st.text("ab", min_size=1, max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    sizes_of_chunks,
    st.booleans(),
    st.integers(0, 5),
)
def test_a_stop_string_ends_the_output_at_the_same_place_for_any_chunking(
    text: str, stops: list[str], sizes: Iterator[int], include: bool, min_tokens: int
) -> None:
    params = {"stop": stops, "include_stop_str_in_output": include, "min_tokens": min_tokens}

    def run(parts: list[list[int]], kind: OutputKind) -> tuple[CompletionOutput, list[str]]:
        processor = start(output_kind=kind, **params)
        outputs, aborts = [], []
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            result = processor.process([EngineOutput("r", part, finish_reason="length" if last else None)])
            outputs += result.outputs
            aborts += result.aborts
        assert len(processor) == 0
        return completion(merge_deltas(outputs)), aborts

    tokens = list(text.encode())
    whole, _ = run([tokens], "final_only")
    single, aborts = run([[token] for token in tokens], "delta")
    parted, _ = run(split(tokens, sizes), "delta")
    assert whole == single == parted
    assert text.startswith(single.text)
    if single.finish_reason == "stop":
        assert single.stop_reason in stops
        assert single.text.endswith(str(single.stop_reason)) or not include
        assert aborts == ([] if len(single.token_ids) == len(text) else ["r"])
    else:
        assert single.text == text
        assert not any(stop in text[min_tokens:] for stop in stops)
    if not include:
        assert not any(stop in single.text[min_tokens:] for stop in stops)


def test_no_part_of_a_stop_string_leaks() -> None:
    processor = start(output_kind="delta", stop="END")
    outputs = feed(processor, said("a"), said("E"), said("N"), said("x"), said("EN"), said("D!"), said("more"))
    assert [completion(o).text for o in outputs] == ["a", "", "", "ENx", "", ""]
    last = completion(outputs[-1])
    assert (last.finish_reason, last.stop_reason, last.token_ids) == ("stop", "END", list(b"D"))
    assert outputs[-1].finished


def test_a_partial_stop_string_is_let_out_at_the_end() -> None:
    (output,) = feed(start(stop="END", output_kind="final_only"), said("aEN"), said("", finish_reason="length"))
    assert completion(output).text == "aEN"
    assert completion(output).finish_reason == "length"


def test_tokens_without_text() -> None:
    (output,) = feed(start(detokenize=False), said("Hi", finish_reason="length"))
    assert (completion(output).text, completion(output).token_ids) == ("", list(b"Hi"))
    without = OutputProcessor(None)
    without.add(INPUTS.process([1], SamplingParams(), request_id="r"))
    (output,) = feed(without, said("Hi", finish_reason="length"))
    assert (completion(output).text, completion(output).token_ids) == ("", list(b"Hi"))


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_have_one_entry_per_token(kind: OutputKind) -> None:
    steps = [
        said("ab", logprobs=[logprobs_of(t, 3) for t in b"ab"]),
        said("c", logprobs=[logprobs_of(ord("c"), 3)], finish_reason="length"),
    ]
    outputs = feed(start(logprobs=3, output_kind=kind), *steps)
    for output in outputs:
        only = completion(output)
        assert only.logprobs is not None
        assert len(only.logprobs) == len(only.token_ids)
    last = completion(outputs[-1])
    assert last.cumulative_logprob == -6.0
    assert last.logprobs is not None
    entry = last.logprobs[-1]
    assert list(entry) == [ord("c"), ord("d"), ord("f")]
    assert (entry[ord("c")].rank, entry[ord("c")].logprob, entry[ord("c")].decoded_token) == (2, -2.0, "c")
    assert (entry[ord("d")].rank, entry[ord("d")].logprob, entry[ord("d")].decoded_token) == (1, -1.0, "d")
    assert entry[ord("f")].rank == 3


def test_zero_logprobs_give_the_chosen_token_only() -> None:
    (output,) = feed(start(logprobs=0), said("a", logprobs=[logprobs_of(97, 0)], finish_reason="length"))
    assert [list(entry) for entry in completion(output).logprobs or ()] == [[97]]


def test_logprobs_end_where_a_stop_string_ends_the_output() -> None:
    step = said("abcd", logprobs=[logprobs_of(t, 1) for t in b"abcd"])
    (output,) = feed(start(logprobs=1, stop="b"), step)
    only = completion(output)
    assert (only.token_ids, len(only.logprobs or ()), only.cumulative_logprob) == (list(b"ab"), 2, -4.0)


def test_predicted_tokens_behind_a_stop_string_are_not_accepted() -> None:
    steps = (
        said("abcd", num_accepted_predictions=3, num_rejected_predictions=2),
        said("efXYghij", num_accepted_predictions=7),
    )
    for stop, expected in ((), (10, 2)), (("XY",), (3 + 4, 2 + 3)):
        last = feed(start(stop=stop), *steps)[-1]
        only = completion(last)
        assert (only.num_accepted_predictions, only.num_rejected_predictions) == expected
        assert only.num_accepted_predictions < len(only.token_ids)


def test_logprobs_are_absent_unless_asked_for() -> None:
    (output,) = feed(start(), said("a", finish_reason="length"))
    assert (completion(output).logprobs, completion(output).cumulative_logprob) == (None, None)
    assert output.prompt_logprobs is None


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_logprobs_begin_with_none_and_may_come_in_parts(kind: OutputKind) -> None:
    steps = [
        said("", prompt_logprobs=[logprobs_of(t, 1) for t in b"b"]),
        said("x", prompt_logprobs=[logprobs_of(t, 1) for t in b"cd"], num_cached_tokens=0),
        said("y", finish_reason="length"),
    ]
    outputs = feed(start("abcd", prompt_logprobs=1, output_kind=kind), *steps)
    first = outputs[0].prompt_logprobs
    assert first is not None
    assert first[0] is None
    assert [next(iter(entry)) for entry in first[1:] if entry is not None] == list(b"bcd")
    if kind == "delta":
        assert outputs[1].prompt_logprobs is None  # said once
    assert outputs[0].num_cached_tokens == 0


def test_prompt_logprobs_wait_for_the_child_that_computes_them() -> None:
    processor = start("ab", n=2, prompt_logprobs=1, output_kind="delta")
    (early,) = feed(processor, said("x", "1_r"))
    (late,) = feed(processor, said("x", "0_r", prompt_logprobs=[logprobs_of(ord("b"), 1)]))
    assert early.prompt_logprobs is None
    assert len(late.prompt_logprobs or ()) == 2


def test_completions_of_one_step_come_in_one_output() -> None:
    processor = start(n=2, output_kind="delta")
    (first,) = processor.process([said("a", "0_r"), said("b", "1_r")]).outputs
    assert [(c.index, c.text) for c in first.outputs] == [(0, "a"), (1, "b")]
    (second,) = processor.process([said("c", "1_r", finish_reason="length")]).outputs
    assert [(c.index, c.text, c.finish_reason) for c in second.outputs] == [(1, "c", "length")]
    assert not second.finished
    (third,) = processor.process([said("d", "0_r", finish_reason="stop")]).outputs
    assert [c.index for c in third.outputs] == [0]
    assert third.finished
    assert len(processor) == 0


@pytest.mark.parametrize("kind", ["cumulative", "final_only"])
def test_whole_outputs_hold_all_completions_in_order(kind: OutputKind) -> None:
    outputs = feed(
        start(n=2, output_kind=kind),
        said("b", "1_r", finish_reason="length"),
        said("a", "0_r", finish_reason="length"),
    )
    assert [(c.index, c.text) for c in outputs[-1].outputs] == [(0, "a"), (1, "b")]
    assert len(outputs) == (2 if kind == "cumulative" else 1)


def test_a_failure_ends_the_whole_request_and_stops_its_siblings() -> None:
    processor = start(n=3)
    processor.process([said("a", "2_r", finish_reason="length")])
    result = processor.process([said("a", "0_r"), said("", "1_r", finish_reason="error", error="boom")])
    assert result.outputs == []
    assert [(f.request_id, str(f)) for f in result.failures] == [("r", "request r failed: boom")]
    assert result.aborts == ["0_r"]
    assert len(processor) == 0


def test_a_failure_leaves_other_requests_alone() -> None:
    processor = start()
    processor.add(INPUTS.process("q", SamplingParams(), request_id="other"))
    result = processor.process([said("", "r", finish_reason="error", error="boom"), said("x", "other")])
    assert [f.request_id for f in result.failures] == ["r"]
    assert [o.request_id for o in result.outputs] == ["other"]


def test_abort_hands_out_what_was_held_back() -> None:
    processor = start(n=2, stop="END")
    processor.process([said("aEN", "0_r"), said("b", "1_r", finish_reason="length")])
    engine_ids, last = processor.abort("r")
    assert engine_ids == ["0_r"]
    assert last is not None
    assert last.finished
    assert [(c.text, c.finish_reason) for c in last.outputs] == [("aEN", "abort"), ("b", "length")]
    assert processor.abort("r") == ([], None)
    assert processor.process([said("late", "0_r")]) == ProcessedOutputs()


def test_an_id_is_free_again_only_when_the_engine_has_let_go_of_it() -> None:
    processor = start()
    request = INPUTS.process("q", SamplingParams(), request_id="r")
    with pytest.raises(RequestError, match="in use") as refused:
        processor.add(request)
    assert refused.value.field == "request_id"
    processor.abort("r")
    with pytest.raises(RequestError, match="in use"):
        processor.add(request)
    processor.process([said("late"), said("", finish_reason="abort")])
    processor.add(request)


def test_a_child_id_may_not_meet_another_request() -> None:
    processor = start(n=2)
    with pytest.raises(RequestError, match="in use"):
        processor.add(INPUTS.process("q", SamplingParams(), request_id="1_r"))


def test_times_are_kept() -> None:
    processor = start()
    (first,) = feed(processor, said("a"))
    assert first.metrics.first_token_time is not None
    assert first.metrics.arrival_time <= first.metrics.first_token_time
    (last,) = feed(processor, said("a", finish_reason="length"))
    assert last.metrics.finished_time is not None
    assert last.metrics.finished_time >= first.metrics.first_token_time


def test_outputs_handed_out_do_not_change_later() -> None:
    processor = start(logprobs=0)
    (first,) = feed(processor, said("a", logprobs=[logprobs_of(97, 0)]))
    feed(processor, said("b", logprobs=[logprobs_of(98, 0)]))
    assert (completion(first).text, completion(first).token_ids) == ("a", [97])
    assert len(completion(first).logprobs or ()) == 1


def test_a_delta_stream_keeps_nothing_it_has_handed_out() -> None:
    processor = start(output_kind="delta", logprobs=0)
    for _ in range(3):
        feed(processor, said("abc", logprobs=[logprobs_of(t, 0) for t in b"abc"]))
    _, completion_state = processor._completions["r"]
    assert (completion_state._pieces, completion_state._token_ids, completion_state._logprobs) == ([], [], [])


@contextmanager
def no_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("end", ["finish", "stop string", "abort", "error", "clear"])
def test_nothing_keeps_a_request_after_its_end(end: str) -> None:
    with no_collector():
        processor = start(n=2, stop="S", logprobs=0)
        state = weakref.ref(processor._requests["r"])
        assert state() is not None
        match end:
            case "finish":
                processor.process([said("a", f"{i}_r", finish_reason="length") for i in range(2)])
            case "stop string":
                processor.process([said("aS", f"{i}_r") for i in range(2)])
            case "abort":
                processor.abort("r")
            case "error":
                processor.process([said("", "0_r", finish_reason="error", error="boom")])
            case "clear":
                assert processor.clear("the engine is gone") == ["r"]
        assert state() is None
        assert len(processor) == 0
        assert not processor._completions
