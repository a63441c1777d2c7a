"""A thinking budget ends thinking at the same place, with the same bits, however a request is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config.engine import EngineConfig
from quire.planning.engine_plan import plan_memory
from quire.types.sampling import SamplingParams, ThinkingMarks
from tests.e2e.tiny import Driver, make_engine, make_model, run_alone

END = (150, 151, 150, 152)
PROMPTS = [[5, 9, 33 + index] for index in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), model_type="llama")


def params(seed: int, budget: int | None) -> SamplingParams:
    marks = ThinkingMarks((7,), END, True)
    return SamplingParams(
        temperature=1.0,
        seed=seed,
        max_tokens=60,
        ignore_eos=True,
        logprobs=1,
        thinking_token_budget=budget,
        thinking_marks=None if budget is None else marks,
    )


def test_alone_in_a_batch_and_preempted(model: Path) -> None:
    budgets = [0, 1, 7, 30, 44, None]
    core = make_engine(model, enable_prefix_caching=False)
    alone = [
        run_alone(core, prompt, params(index, budget))
        for index, (prompt, budget) in enumerate(zip(PROMPTS, budgets, strict=True))
    ]
    for answer, budget in zip(alone, budgets, strict=True):
        if budget is not None:
            assert tuple(answer.token_ids[budget : budget + len(END)]) == END
    layout = plan_memory(EngineConfig.from_flat(model=str(model))).layout
    blocks = sum(layout.blocks_for(100, 64)) + 4
    core = make_engine(
        model,
        kv_cache_memory=blocks * layout.page_bytes,
        max_model_len=100,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        steps_in_flight=2,
    )
    driver = Driver(core)
    for index, (prompt, budget) in enumerate(zip(PROMPTS, budgets, strict=True)):
        driver.add(str(index), prompt, params(index, budget))
    answers = driver.finish()
    assert [answers[str(index)].content() for index in range(6)] == [answer.content() for answer in alone]
    assert core.scheduler.stats().num_preemptions > 0


def test_given_outputs_count(model: Path) -> None:
    """A request that goes on after outputs of an engine that died thinks no longer for it."""
    core = make_engine(model)
    whole = run_alone(core, PROMPTS[0], params(3, 20))
    for given in (3, 20, 22, 24, 40):
        driver = Driver(core)
        tokens = [*PROMPTS[0], *whole.token_ids[:given]]
        driver.add("resumed", tokens, params(3, 20), num_prompt_tokens=len(PROMPTS[0]))
        assert driver.finish()["resumed"].token_ids == whole.token_ids[given:]
