"""Loads of experts on a GPU: counted in captured steps, which give the same tokens and wait for nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.types.step import StepPlan, StepResult
from tests.e2e.tiny import EXPERTS, make_engine, make_model
from tests.gpu.helpers import SIZES, make_jobs, needs_gpu, run_jobs

pytestmark = needs_gpu


def test_counting_changes_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.runner.experts.EVERY", 1)
    model = make_model(tmp_path / "model", "qwen3_moe", **{**SIZES, **EXPERTS, "moe_intermediate_size": 128})
    jobs, found, told = make_jobs(12, longest=100), [], [0] * EXPERTS["num_experts"]
    for counts in (False, True):
        core = make_engine(model, expert_load_stats=counts, deterministic=True, kv_cache_memory=64 << 20)
        finish = core.scheduler.update

        def update(plan: StepPlan, result: StepResult, seconds: float, finish: Any = finish) -> Any:
            told[:] = map(sum, zip(told, result.expert_load.get(1, [0] * len(told)), strict=True))
            return finish(plan, result, seconds)

        monkeypatch.setattr(core.scheduler, "update", update)
        found.append(run_jobs(core, jobs, seed=5))
        core.shutdown()
    assert {name: answer.content() for name, answer in found[0].items()} == {
        name: answer.content() for name, answer in found[1].items()
    }
    outputs = sum(len(answer.token_ids) for answer in found[1].values())
    assert sum(told) >= EXPERTS["num_experts_per_tok"] * (outputs - len(jobs))  # and of prompts, and of padding
