"""Drafts change how many tokens a step gives and never which: right ones, wrong ones and any mixture of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.engine.core import EngineCore
from quire.planning.engine_plan import plan_memory
from quire.platform.cpu import CpuPlatform
from tests.e2e.drafting import EAGER, Counting, Oracle, assert_same, draft_with, engine, run
from tests.e2e.tiny import VOCAB, Answer, make_model
from tests.runner.engines import capture_steps, run_eagerly, runner_of, spy_on

SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 4}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": 24,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    },
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("speculation") / request.param, **MODELS[request.param])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("speculation") / "llama", "llama")


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Answer]:
    return run(engine(model))


@pytest.fixture(scope="module")
def of_llama(llama: Path) -> dict[str, Answer]:
    return run(engine(llama))


def speculating(
    model: Path, outputs: dict[str, Answer], wrong: float, **settings: Any
) -> tuple[EngineCore, Counting]:
    core = engine(model, speculative_config=SPECULATIVE, **settings)
    known = {name: answer.token_ids for name, answer in outputs.items()}
    draft_with(core, Oracle(known, VOCAB, wrong=wrong, seed=int(10 * wrong)))
    return core, Counting(core)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_tokens_are_those_of_no_speculation(
    model: Path, expected: dict[str, Answer], wrong: float, depth: int
) -> None:
    core, counted = speculating(model, expected, wrong, steps_in_flight=depth)
    assert_same(run(core, seed=depth), expected)
    assert counted.num_drafts > 100
    if wrong == 0.0:
        assert counted.num_accepted == counted.num_drafts
    elif wrong == 1.0:
        assert counted.num_accepted < counted.num_drafts / 10  # a wrong one may be right for another position


def test_eager_steps_give_the_same(model: Path, expected: dict[str, Answer]) -> None:
    core, _ = speculating(model, expected, 0.3)
    run_eagerly(core)
    assert_same(run(core, seed=7), expected)


def test_kernel_lists_take_steps_with_drafts(llama: Path, of_llama: dict[str, Answer]) -> None:
    core, _ = speculating(llama, of_llama, 0.3)
    spy = spy_on(core)
    run(core)
    drafted = [shape for shape in spy.ran if shape.sampling.drafted]
    assert len(drafted) > 20
    assert not any(shape.sampling.drafted for shape in spy.refused)


@pytest.mark.parametrize("wrong", [0.0, 0.3])
def test_results_may_come_late(
    llama: Path, of_llama: dict[str, Answer], wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: steps are started while only the device knows how many drafts of those before hold."""
    monkeypatch.setattr(CpuPlatform, "asynchronous", True)
    core, _ = speculating(llama, of_llama, wrong, steps_in_flight=3)
    run_eagerly(core)
    assert_same(run(core, seed=3), of_llama)


def test_captured_steps_give_the_same(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(engine(llama, attention_backend="torch_ref"), left_out=EAGER)
    capture_steps(monkeypatch)
    core, counted = speculating(llama, expected, 0.3, attention_backend="torch_ref")
    spy = spy_on(core)
    assert_same(run(core, seed=2, left_out=EAGER), expected)
    assert counted.num_drafts > 100
    assert sum(shape.sampling.drafted for shape in spy.ran) > 20


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_drops_drafts(model: Path, depth: int) -> None:
    layout = plan_memory(EngineConfig.from_flat(model=str(model))).layout
    blocks = sum(layout.blocks_for(140, 64)) + 2
    small = {"kv_cache_memory": blocks * layout.page_bytes, "max_model_len": 140, "max_num_batched_tokens": 64}
    expected = run(engine(model, max_model_len=140), outputs=80)
    core, _ = speculating(model, expected, 0.2, steps_in_flight=depth, max_num_seqs=8, **small)
    assert_same(run(core, outputs=80), expected)
    assert core.scheduler.stats().num_preemptions > 0


def test_a_step_has_no_more_drafts_than_it_has_room_for(llama: Path, of_llama: dict[str, Answer]) -> None:
    core, _ = speculating(llama, of_llama, 0.0, max_num_seqs=32, max_num_batched_tokens=40)
    most = runner_of(core).sampler._max_samples
    spy = spy_on(core)
    assert_same(run(core), of_llama)
    assert max(shape.num_samples for shape in spy.ran) <= min(most, 40)
