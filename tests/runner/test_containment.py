"""A request whose numbers break fails alone: neither its batch nor whoever gets its blocks later is spoiled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.platform.cpu import CpuPlatform
from quire.runner.containment import MESSAGE
from quire.types.sampling import SamplingParams
from tests.e2e.broken import BAD, BAD_PROMPT, GOOD_PROMPT, assert_finite, broken_copy, make_broken
from tests.e2e.tiny import Answer, Driver, make_engine, make_model, run_alone

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broken")
    return make_model(folder, "qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=2)


@pytest.fixture(scope="module")
def expected(model: Path) -> Answer:
    return run_alone(make_engine(model), GOOD_PROMPT, PARAMS)


@pytest.mark.parametrize("chunk", [512, 8])
@pytest.mark.parametrize("steps_in_flight", [1, 3])
@pytest.mark.parametrize("narrow_above", [None, 4])
def test_only_the_broken_request_fails(
    model: Path,
    expected: Answer,
    chunk: int,
    steps_in_flight: int,
    narrow_above: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CpuPlatform, "narrow_above", narrow_above)
    core = make_broken(model, max_num_batched_tokens=chunk, max_num_seqs=4, steps_in_flight=steps_in_flight)
    driver = Driver(core)
    for index in range(4):
        driver.add(f"good {index}", GOOD_PROMPT, PARAMS)
        driver.add(f"bad {index}", BAD_PROMPT, PARAMS)
    answers = driver.finish()
    for index in range(4):
        assert answers[f"bad {index}"].finish_reason == "error"
        assert answers[f"bad {index}"].error == MESSAGE
        assert answers[f"good {index}"].content() == expected.content()
    assert_finite(core)


def test_a_prompt_fails_in_its_first_broken_chunk(model: Path) -> None:
    core = make_broken(model, max_num_batched_tokens=8, max_num_seqs=2)
    driver = Driver(core)
    driver.add("bad", [BAD, *range(20, 200)], PARAMS)
    driver.step()
    assert driver.answers["bad"].error == MESSAGE
    assert not core.has_work()


def test_blocks_of_a_broken_request_serve_the_next_one(model: Path, expected: Answer) -> None:
    core = make_broken(model, max_model_len=64, kv_cache_memory=400_000)
    for _ in range(3):
        assert run_alone(core, BAD_PROMPT, PARAMS).error == MESSAGE
        assert run_alone(core, GOOD_PROMPT, PARAMS).content() == expected.content()
    assert_finite(core)


def test_a_token_that_breaks_while_generating(model: Path, expected: Answer) -> None:
    """The prompt is fine; what is sampled is not."""
    core = make_broken(model)
    forced = SamplingParams(temperature=0.0, max_tokens=6, allowed_token_ids=[BAD])
    answer = run_alone(core, GOOD_PROMPT, forced)
    assert (answer.token_ids, answer.finish_reason) == ([BAD], "error")
    assert answer.error is not None
    assert "NaN" in answer.error
    assert_finite(core)
    assert run_alone(core, GOOD_PROMPT, PARAMS).content() == expected.content()


def test_weights_that_are_all_broken(model: Path) -> None:
    core = make_engine(broken_copy(model, "model.layers.1.mlp.down_proj.weight", ..., torch.inf))
    for _ in range(2):
        assert run_alone(core, GOOD_PROMPT, PARAMS).error == MESSAGE
    assert not core.has_work()
    assert_finite(core)
