"""Heads that draft propose what the same heads in plain torch would, and change no token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.types.errors import ConfigError, QuireError
from quire.types.sampling import SamplingParams
from quire.types.step import StepResult
from tests.e2e import draft_heads
from tests.e2e.draft_heads import Draft, Target
from tests.e2e.drafting import Counting, assert_same, draft_always, engine, run
from tests.e2e.tiny import Driver, make_engine, make_model
from tests.runner.engines import runner_of

HEADS: dict[str, Callable[[Path, Target], tuple[Path, Draft]]] = {
    "eagle": draft_heads.eagle,
    "eagle3": draft_heads.eagle3,
    "medusa": draft_heads.medusa,
}
MTP: dict[str, Callable[[Path], tuple[Path, Draft]]] = {
    "deepseek": draft_heads.mtp_deepseek,
    "glm": draft_heads.mtp_glm,
    "qwen": draft_heads.mtp_qwen,
    "qwen3.5": draft_heads.mtp_qwen35,
}
Case = tuple[Path, dict[str, Any], Draft]


@pytest.fixture(scope="module", params=[*HEADS, *MTP])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A target, what drafts for it, and what that should propose."""
    folder, name = tmp_path_factory.mktemp("heads"), request.param
    if name in MTP:
        target, draft = MTP[name](folder / "target")
        return target, {"method": "mtp", "num_speculative_tokens": 3}, draft
    target = make_model(folder / "target", "llama")
    head, draft = HEADS[name](folder / "head", Target(target))
    return target, {"method": name, "model": str(head), "num_speculative_tokens": 3}, draft


def test_proposals_are_those_of_the_reference(case: Case) -> None:
    """Behind a prompt in chunks, behind drafts that do not hold, and in a batch."""
    target, config, draft = case
    core = make_engine(target, speculative_config=config, dtype="float32", max_num_batched_tokens=16, num_threads=1)
    draft_always(core)
    runner = runner_of(core)
    rows, finish = runner.rows, runner.finish
    seen: list[tuple[list[int], list[int]]] = []  # what was proposed, and what should have been

    def look(step: Any) -> StepResult:
        result = finish(step)
        for index, tokens in result.proposals.items():
            row = step.plan.rows[index]
            known = rows.token_ids[row, : rows.host_num_tokens[row]].tolist()
            seen.append((tokens, draft(known, step.plan.num_proposals[row])))
        return result

    runner.finish = look
    driver = Driver(core)
    for index, length in enumerate((1, 7, 30)):
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        driver.add(str(index), [(5 + 3 * place + index) % 190 + 3 for place in range(length)], params)
    driver.finish()
    assert [proposed for proposed, _ in seen] == [expected for _, expected in seen]
    assert len(seen) > 8


@pytest.mark.parametrize("case", ["glm", "qwen", "qwen3.5"], indirect=True)
def test_tokens_are_those_of_no_speculation(case: Case) -> None:
    """Of the heads that test_speculation_covering.py leaves out."""
    target, config, _ = case
    core = engine(target, speculative_config=config)
    draft_always(core)
    counted = Counting(core)
    assert_same(run(core, seed=1), run(engine(target)))
    assert counted.num_drafts > 100


def test_both_layouts_of_medusa_are_one(tmp_path: Path) -> None:
    target = make_model(tmp_path / "target", "llama")
    head, draft = draft_heads.medusa(tmp_path / "head", Target(target), converted=True)
    core = make_engine(target, speculative_config={"method": "medusa", "model": str(head)}, dtype="float32")
    draft_always(core)
    driver = Driver(core)
    driver.add("a", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    driver.finish()
    assert runner_of(core).proposer is not None
    assert draft([5, 6, 7, 8], 3)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    target = make_model(tmp_path / "target", "llama")
    head, _ = draft_heads.eagle(tmp_path / "head", Target(target))
    wide = make_model(tmp_path / "wide", "llama", hidden_size=96)
    with pytest.raises(ConfigError, match="hidden states of size 64 and its target's have 96"):
        make_engine(wide, speculative_config={"method": "eagle", "model": str(head)})
    with pytest.raises(QuireError, match=r"mtp.*LlamaForCausalLM.*DeepseekV3ForCausalLM"):
        make_engine(target, speculative_config={"method": "mtp"})
    bare = make_model(tmp_path / "bare", "deepseek_v3", **draft_heads.LATENT)
    with pytest.raises(ConfigError, match=r"no module that drafts \(no tensor model.layers.4.\*\)"):
        make_engine(bare, speculative_config={"method": "mtp"})
