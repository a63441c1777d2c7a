"""Drafts change how many tokens a step gives and never which: right ones, wrong ones and any mixture of both."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.engine.core import EngineCore
from quire.platform.cpu import CpuPlatform
from quire.types.sampling import SamplingParams, ThinkingMarks
from quire.types.step import StepPlan, StepResult
from quire.worker.planning import plan_memory
from tests.e2e.drafting import Oracle, draft_with
from tests.e2e.tiny import VOCAB, Answer, Driver, make_engine, make_model
from tests.e2e.tiny_grammar import VOCABULARY, regex
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
# What requests ask for; each is greedy once and sampled once.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": 3},
    "wide logprobs": {"logprobs": 30},
    "asked logprobs": {"logprobs": 0, "logprob_token_ids": (5, 17)},
    "penalties": {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.2, "logprobs": 1},
    "min tokens": {"min_tokens": 12, "stop_token_ids": tuple(range(20, 60)), "ignore_eos": False},
    "stop": {"stop_token_ids": tuple(range(30, 34)), "ignore_eos": False},
    "bad words": {"bad_words_token_ids": tuple((token, other) for token in range(9, 70) for other in (7, 8, 9))},
    "bias": {"logit_bias": {7: 2.0, 9: 3.0, 11: -100.0}},
    "allowed": {"allowed_token_ids": tuple(range(40, 90)), "repetition_penalty": 1.4},
    "limits": {"top_k": 12, "top_p": 0.9, "min_p": 0.02},
    "thinking": {"thinking_token_budget": 6, "thinking_marks": ThinkingMarks((40,), (41, 42), True)},
}
GRAMMAR = r"([a-f]{1,3}[0-9]){2,12}"


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("speculation") / request.param, **MODELS[request.param])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("speculation") / "llama", "llama")


def engine(model: Path, **settings: Any) -> EngineCore:
    core = make_engine(model, num_threads=2, **settings)
    core.constraints.set_vocabulary(VOCABULARY)
    return core


def requests(seed: int = 0, outputs: int = 30) -> dict[str, tuple[list[int], SamplingParams, dict[str, Any]]]:
    """One of each kind of request; many share a prefix, and two share all of their prompt."""
    rng = random.Random(seed)
    stem = [rng.randrange(3, VOCAB) for _ in range(40)]
    found: dict[str, tuple[list[int], SamplingParams, dict[str, Any]]] = {}
    for sampled in (False, True):
        for name, fields in FEATURES.items():
            params = {
                "temperature": 0.9 if sampled else 0.0,
                "seed": rng.getrandbits(40),
                "ignore_eos": True,
                **fields,
            }
            prompt = stem[: rng.choice([0, 20, 40])] + [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 9))]
            found[f"{name}, {sampled}"] = prompt, SamplingParams(max_tokens=rng.randint(8, outputs), **params), {}
    prompt, params, _ = found["plain, True"]
    found["n > 1"] = prompt, SamplingParams(temperature=0.9, seed=1, max_tokens=20, ignore_eos=True), {}
    for seed_of, temperature in ((3, 0.0), (4, 1.0)):
        constrained = SamplingParams(temperature=temperature, seed=seed_of, max_tokens=24, logprobs=2)
        found[f"grammar, {temperature}"] = stem[:11], constrained, {"grammar": regex(GRAMMAR)}
    return found


def run(core: EngineCore, seed: int = 0, **kinds: Any) -> dict[str, Answer]:
    """All requests, at random steps."""
    rng, driver = random.Random(seed), Driver(core)
    for name, (prompt, params, fields) in requests(**kinds).items():
        driver.add(name, prompt, params, **fields)
        for _ in range(rng.choice([0, 0, 0, 1, 3])):
            driver.step()
    answers = driver.finish()
    core.scheduler.check_integrity()
    stats = core.scheduler.stats()
    assert stats.num_free_blocks == stats.num_blocks, "blocks of drafts are given back"
    return answers


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Answer]:
    return run(engine(model))


@pytest.fixture(scope="module")
def of_llama(llama: Path) -> dict[str, Answer]:
    return run(engine(llama))


def assert_same(found: dict[str, Answer], expected: dict[str, Answer]) -> None:
    assert {name: answer.error for name, answer in found.items() if answer.error} == {}
    for name, answer in expected.items():
        assert found[name].content() == answer.content(), name


class Counting:
    """Counts drafts, and those that held, of the steps of an engine."""

    def __init__(self, core: EngineCore) -> None:
        self.num_drafts = self.num_accepted = self.num_steps = 0
        self._finish = runner_of(core).finish
        runner_of(core).finish = self._count  # type: ignore[method-assign]

    def _count(self, step: Any) -> StepResult:
        result, plan = self._finish(step), step.plan
        assert isinstance(plan, StepPlan)
        self.num_steps += 1
        for row, tokens in zip(plan.rows, result.token_ids, strict=True):
            if drafts := plan.draft_token_ids.get(row):
                self.num_drafts += len(drafts)
                self.num_accepted += len(tokens) - 1
        return result


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


def test_captured_steps_give_the_same(
    llama: Path, of_llama: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_steps(monkeypatch)
    core, _ = speculating(llama, of_llama, 0.3)
    assert_same(run(core, seed=2), of_llama)


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
