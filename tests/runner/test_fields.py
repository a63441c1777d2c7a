"""Every field of SamplingParams, set alone, does the same on every way to run steps, and does something."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from quire.engine.core import EngineCore
from quire.types.sampling import RepetitionDetectionParams, SamplingParams, ThinkingMarks
from tests.e2e.tiny import Driver, make_engine, make_model
from tests.kernels.triton.paged import needs_triton
from tests.runner.engines import capture_steps, run_eagerly, spy_on

PROMPT = [5, 9, 5, 17, 30, 5, 9]
BASE: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_tokens": 6, "ignore_eos": True}
# What both the request with the field and the one without have besides, where the field needs it to be seen.
AROUND: dict[str, dict[str, Any]] = {
    **{name: {"allowed_token_ids": [7, 8, 9, 10, 11]} for name in ("presence_penalty", "frequency_penalty")},
    "ignore_eos": {"allowed_token_ids": [2]},
    "min_tokens": {"allowed_token_ids": [2, 7], "ignore_eos": False, "logit_bias": {2: 50.0}},
    "repetition_detection": {"allowed_token_ids": [7]},
    "thinking_token_budget": {"thinking_marks": ThinkingMarks((), (50, 51), True)},
    "thinking_marks": {"thinking_token_budget": 3},
}
# A value for each field that the engine reads, which changes what the request above is answered.
PROBES: dict[str, dict[str, Any]] = {
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "repetition_penalty": {"repetition_penalty": 0.02},
    "temperature": {"temperature": 0.0},
    "top_p": {"top_p": 0.02},
    "top_k": {"top_k": 1},
    "min_p": {"min_p": 1.0},
    "seed": {"seed": 12},
    "stop_token_ids": {"stop_token_ids": list(range(3, 190))},
    "ignore_eos": {"ignore_eos": False},
    "max_tokens": {"max_tokens": 3},
    "min_tokens": {"min_tokens": 3},
    "logprobs": {"logprobs": 2},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "logprob_token_ids": {"logprob_token_ids": [5, 190]},
    "thinking_token_budget": {"thinking_token_budget": 3},
    "thinking_marks": {"thinking_marks": ThinkingMarks((), (50, 51), True)},
    "logit_bias": {"logit_bias": {33: 60.0}},
    "allowed_token_ids": {"allowed_token_ids": [7, 8]},
    "repetition_detection": {"repetition_detection": RepetitionDetectionParams(max_pattern_size=1, min_count=2)},
    "bad_words_token_ids": {"bad_words_token_ids": tuple((token,) for token in range(100))},
}
# What the frontend does with text, or what only reaches plug-ins.
ELSEWHERE = {
    "n",
    "stop",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "truncate_prompt_tokens",
    "truncation_side",
    "stream_interval",
    "output_kind",
    "bad_words",
    "structured_outputs",
    "extra_args",
    "speculate",
    "return_routed_experts",  # tests/e2e/test_routed_experts.py
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=1)


def answers(core: EngineCore) -> dict[str, object]:
    """Each probe beside the base, so that most steps have rows of several kinds."""
    found: dict[str, object] = {}
    without = {f"without {name}": around for name, around in AROUND.items()}
    probes = {name: {**AROUND.get(name, {}), **probe} for name, probe in PROBES.items()}
    for name, probe in {"": {}, **without, **probes}.items():
        driver = Driver(core)
        driver.add("probe", PROMPT, SamplingParams(**{**BASE, **probe}))
        driver.add("beside", PROMPT[2:], SamplingParams(**{**BASE, "seed": 3}))
        done = driver.finish()
        answer = done["probe"]
        assert answer.error is None
        found[name] = (answer.token_ids, answer.logprobs, answer.prompt_logprobs, answer.finish_reason)
        found[f"{name} beside"] = done["beside"].content()
    return found


def test_every_field_has_its_place() -> None:
    fields = {field.name for field in msgspec.structs.fields(SamplingParams)}
    assert fields == set(PROBES) | ELSEWHERE, "a new field needs a probe here, or a reason to be elsewhere"


@pytest.fixture(scope="module")
def eager(model: Path) -> dict[str, object]:
    core = make_engine(model, max_num_seqs=4, max_model_len=64)
    run_eagerly(core)
    return answers(core)


@pytest.mark.parametrize("field", PROBES)
def test_each_field_alone_does_something(eager: dict[str, object], field: str) -> None:
    assert eager[field] != eager[f"without {field}" if field in AROUND else ""]
    assert eager[f"{field} beside"] == eager[" beside"], "and nothing to the row beside it"


def kernel_list(model: Path, monkeypatch: pytest.MonkeyPatch) -> EngineCore:
    return make_engine(model, max_num_seqs=4, max_model_len=64)


def cuda_graphs(model: Path, monkeypatch: pytest.MonkeyPatch) -> EngineCore:
    capture_steps(monkeypatch)
    return make_engine(model, max_num_seqs=4, max_model_len=64, attention_backend="triton")


@pytest.mark.parametrize("make", [kernel_list, pytest.param(cuda_graphs, marks=[needs_triton, pytest.mark.nightly])])
def test_every_way_answers_alike(
    model: Path,
    eager: dict[str, object],
    make: Callable[[Path, pytest.MonkeyPatch], EngineCore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = make(model, monkeypatch)
    spy = spy_on(core)
    found = answers(core)
    if make is kernel_list:
        assert found == eager, "to the bit"
    for name, expected in eager.items():
        tokens, *logprobs, reason = cast(tuple[Any, ...], found[name])
        their_tokens, *their_logprobs, their_reason = cast(tuple[Any, ...], expected)
        assert (tokens, reason) == (their_tokens, their_reason), name
        for mine, theirs in zip(logprobs, their_logprobs, strict=True):
            assert [entry.token_ids for entry in mine or ()] == [entry.token_ids for entry in theirs or ()], name
            for one, other in zip(mine or (), theirs or (), strict=True):
                assert one.logprobs == pytest.approx(other.logprobs, abs=0.01), name  # by other attention
    refused = [shape for shape in spy.refused if not (shape.every_token or shape.sampling.eager)]
    assert refused == [], "only prompt logprobs and logprob_token_ids, which captured steps have no room for"
