"""A head begins behind its target's step on the device, before the host has read what the step gave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.runner.proposers.heads import HeadProposer
from quire.runner.runner import Runner
from quire.runner.step import Step
from quire.types.sampling import SamplingParams
from quire.types.step import StepPlan, StepResult
from tests.e2e.broken import BAD, broken_copy
from tests.e2e.drafting import Counting, draft_always, engine
from tests.e2e.tiny import VOCAB, Driver, make_engine
from tests.e2e.tiny_grammar import regex
from tests.runner.engines import runner_of, worker_of
from tests.runner.test_kept_hidden import PROMPTS, drafter


@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_drafts_are_in_the_queue_before_the_result_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, config = drafter(tmp_path, name)
    core = engine(target, speculative_config=config)
    draft_always(core)
    counted, runner = Counting(core), runner_of(core)
    proposer = runner.proposer
    assert isinstance(proposer, HeadProposer)
    found: list[str] = []
    plans: list[StepPlan] = []
    result, go_on, execute = Step.result, Runner.go_on, runner.execute

    def read(step: Step) -> StepResult:
        if step.state is runner.rows:
            found.append("read")
        return result(step)

    def draft(self: Runner, *args: Any) -> Any:
        found.append("draft")
        return go_on(self, *args)

    def begin(plan: StepPlan) -> Any:
        found.append("step")
        plans.append(plan)
        running = execute(plan)
        ids = runner.rows.token_ids
        assert ((ids >= 0) & (ids < VOCAB)).all(), "pairs of drafts that do not hold read what stands there"
        return running

    monkeypatch.setattr(Step, "result", read)
    monkeypatch.setattr(Runner, "go_on", draft)
    monkeypatch.setattr(runner, "execute", begin)
    driver = Driver(core)
    for index, prompt in enumerate(PROMPTS):
        grammar = {"grammar": regex("[a-f]{40}")} if index == 1 else {}
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        driver.add(str(index), prompt, params, **grammar)
    driver.finish()
    orders = [order.split() for order in " ".join(found).split("step")[1:]]
    assert len(orders) == len(plans)
    asked = [max(plan.num_proposals.values(), default=0) > 1 for plan in plans]
    assert [order[0] == "draft" for order in orders] == asked
    assert {True, False} == set(asked)
    assert any(plan.mask_slots and plan.draft_token_ids and plan.num_proposals for plan in plans)
    assert counted.rejected, "some drafts do not hold"


def test_a_row_that_breaks_leaves_nothing_in_the_heads_cache(tmp_path: Path) -> None:
    """Nor does it change what rows beside it say, or how many of their drafts hold."""
    target, config = drafter(tmp_path, "eagle3")
    bad = broken_copy(target, "model.embed_tokens.weight", [BAD], torch.nan)
    usual = [token for token in range(VOCAB) if token != BAD]
    found = []
    for folder, prompts in ((bad, [*PROMPTS, [20, 21, BAD]]), (target, PROMPTS)):
        core = make_engine(folder, speculative_config=config, enable_prefix_caching=False)
        draft_always(core)
        driver = Driver(core)
        for index, prompt in enumerate(prompts):
            clean = [token if token != BAD or index == len(PROMPTS) else BAD + 1 for token in prompt]
            params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, allowed_token_ids=usual)
            driver.add(str(index), clean, params)
        found.append(driver.finish())
        model = worker_of(core).model
        assert model.drafter is not None
        for layer in [*model.cached_layers(), *model.drafter.cached_layers()]:
            assert layer.cache.isfinite().all()
    assert found[0][str(len(PROMPTS))].finish_reason == "error"
    for name, answer in found[1].items():
        assert found[0][name].content() == answer.content()
