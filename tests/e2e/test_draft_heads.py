"""Heads that draft propose what the same heads in plain torch would, and change no token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.engine.core import EngineCore
from quire.runner.proposers.heads import HeadProposer
from quire.runner.runner import RunningStep
from quire.sched.draft_lengths import EveryDraft, Offer
from quire.sched.drafts import Drafts
from quire.sched.state import StepDraft
from quire.types.errors import ConfigError, QuireError, WeightMismatchError
from quire.types.sampling import SamplingParams
from quire.types.step import StepPlan, StepResult
from tests.e2e import draft_heads
from tests.e2e.draft_heads import Draft, Target
from tests.e2e.drafting import Counting, assert_same, draft_always, engine, run
from tests.e2e.tiny import Driver, make_engine, make_model
from tests.runner.engines import runner_of

HEADS: dict[str, Callable[[Path, Target], tuple[Path, Draft]]] = {
    "eagle": draft_heads.eagle,
    "eagle3": draft_heads.eagle3,
    "medusa": draft_heads.medusa,
    "eagle3 beside latents": draft_heads.eagle3,  # as published for Kimi-K2: the head keeps keys and values
}
MTP: dict[str, Callable[[Path], tuple[Path, Draft]]] = {
    "deepseek": draft_heads.mtp_deepseek,
    "deepseek3.2": draft_heads.mtp_deepseek32,
    "glm": draft_heads.mtp_glm,
    "glm-lite": draft_heads.mtp_glm_lite,
    "glm-dsa": draft_heads.mtp_dsa,
    "longcat": draft_heads.mtp_longcat,
    "qwen": draft_heads.mtp_qwen,
    "qwen3.5": draft_heads.mtp_qwen35,
    "qwen3.5-moe": draft_heads.mtp_qwen35_moe,
    "windows": draft_heads.mtp_windows,
}
Case = tuple[Path, dict[str, Any], Draft]


@pytest.fixture(scope="module", autouse=True)
def _windowed_mtp() -> Iterator[None]:
    with draft_heads.windowed_mtp():
        yield


@pytest.fixture(scope="module", params=[*HEADS, *MTP])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A target, what drafts for it, and what that should propose."""
    folder, name = tmp_path_factory.mktemp("heads"), request.param
    if name in MTP:
        target, draft = MTP[name](folder / "target")
        return target, {"method": "mtp", "num_speculative_tokens": 3}, draft
    latent = {"model_type": "deepseek_v3", **draft_heads.LATENT, "head_dim": 8}
    family: dict[str, Any] = latent if "latents" in name else {"model_type": "llama"}
    target = make_model(folder / "target", **family)
    head, draft = HEADS[name](folder / "head", Target(target))
    return target, {"method": name.split()[0], "model": str(head), "num_speculative_tokens": 3}, draft


class Seen:
    """What an engine's head proposed, and what it should have."""

    def __init__(self, core: EngineCore, draft: Draft, monkeypatch: pytest.MonkeyPatch) -> None:
        self._runner, self._draft = runner_of(core), draft
        self._finish = self._runner.finish
        self.proposed: list[list[int]] = []
        self.expected: list[list[int]] = []
        self.num_steps = 0
        monkeypatch.setattr(self._runner, "finish", self._look)

    def _look(self, step: Any) -> StepResult:
        result, rows = self._finish(step), self._runner.rows
        self.num_steps += 1
        for index, tokens in result.proposals.items():
            row = step.plan.rows[index]
            known = rows.token_ids[row, : rows.host_num_tokens[row]].tolist()
            self.proposed.append(tokens)
            self.expected.append(self._draft(known, step.plan.num_proposals[row]))
        return result


def test_proposals_are_those_of_the_reference(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a prompt in chunks, behind drafts that do not hold, and in a batch."""
    check_proposals(case, monkeypatch)


@pytest.mark.parametrize("case", ["eagle3", "deepseek", "eagle3 beside latents"], indirect=True)
def test_heads_draft_with_torchs_own_attention(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which machines without a C++ compiler have."""
    check_proposals(case, monkeypatch, attention_backend="torch_ref")


def check_proposals(case: Case, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    target, config, draft = case
    # In float16, the default of caches, keys of an index are rounded, and others may be selected.
    exact = {"dtype": "float32", "kv_cache_dtype": "float32"}
    core = make_engine(
        target, speculative_config=config, max_num_batched_tokens=16, num_threads=1, **exact, **settings
    )
    draft_always(core)
    seen = Seen(core, draft, monkeypatch)
    driver = Driver(core)
    for index, length in enumerate((1, 7, 30)):
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        driver.add(str(index), [(5 + 3 * place + index) % 190 + 3 for place in range(length)], params)
    driver.finish()
    assert seen.proposed == seen.expected
    assert len(seen.proposed) > 8


class Seldom(EveryDraft):
    """Asks for drafts in one step of `every`, and for fewer of some rows than of others."""

    def __init__(self, every: int) -> None:
        self._every, self._num_steps = every, 0

    def choose(self, step: StepDraft, offers: list[Offer]) -> list[int]:
        self._num_steps += 1
        return [0 if self._num_steps % self._every else max(1, 3 - offer.index) for offer in offers]


@pytest.mark.parametrize("every", [5, 40])
@pytest.mark.parametrize("case", ["eagle3", "deepseek", "windows"], indirect=True)
def test_a_head_that_is_seldom_asked_computes_what_it_missed(
    case: Case, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It proposes what one does that follows every step: for rows that it was not asked about, and behind blocks
    of requests that ended meanwhile."""
    target, config, draft = case
    found, num_executed = [], []
    for follows in (False, True):
        core = make_engine(target, speculative_config=config, dtype="float32", num_threads=1, block_size=16)
        drafting = core.scheduler._state.drafting
        assert isinstance(drafting, Drafts)
        core.scheduler._state.drafting = Drafts(*drafting._drafters, most=3, lengths=Seldom(every))
        seen, proposer = Seen(core, draft, monkeypatch), runner_of(core).proposer
        assert isinstance(proposer, HeadProposer)
        executed, execute = list[StepPlan](), proposer._runner.execute
        if follows:
            monkeypatch.setattr(proposer, "_keep", lambda fresh, hidden: False)

        def count(
            plan: StepPlan, plans: list[StepPlan] = executed, run: Callable[[StepPlan], RunningStep] = execute
        ) -> RunningStep:
            plans.append(plan)
            return run(plan)

        monkeypatch.setattr(proposer._runner, "execute", count)
        driver = Driver(core)
        params = SamplingParams(temperature=0.0, max_tokens=45, ignore_eos=True)
        prompts = {str(index): [(7 + 5 * place + index) % 190 + 3 for place in range(9)] for index in range(3)}
        for name, prompt in prompts.items():
            driver.add(name, prompt, params)
        first = dict(driver.finish())
        num_executed.append(len(executed))
        for name, prompt in prompts.items():
            driver.add(f"{name} goes on", prompt + first[name].token_ids, params)
        answers = driver.finish()
        assert all(answers[f"{name} goes on"].num_cached_tokens >= 48 for name in prompts)
        found.append(seen)
    assert found[0].proposed == found[1].proposed
    pairs = zip(found[0].proposed, found[0].expected, strict=True)
    assert sum(proposed != expected for proposed, expected in pairs) <= 1, "logits may be near to each other"
    assert len(found[0].proposed) > (20 if every == 5 else 3)
    assert num_executed[0] < num_executed[1] / 2, "it does not run when nobody asks it"


@pytest.mark.parametrize("case", ["glm", "qwen", "qwen3.5", "longcat", "eagle3 beside latents"], indirect=True)
def test_tokens_are_those_of_no_speculation(case: Case) -> None:
    """Of the heads that test_speculation_covering.py leaves out."""
    target, config, _ = case
    core = engine(target, speculative_config=config)
    draft_always(core)
    counted = Counting(core)
    assert_same(run(core, seed=1), run(engine(target)))
    assert counted.num_drafts > 100


@pytest.mark.parametrize(
    ("method", "options"), [("medusa", {"converted": True}), ("eagle", {"bias": False})], ids=["medusa", "eagle"]
)
def test_the_other_published_layout_proposes_the_same(
    method: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_model(tmp_path / "target", "llama")
    head, draft = getattr(draft_heads, method)(tmp_path / "head", Target(target), **options)
    config = {"method": method, "model": str(head), "num_speculative_tokens": 3}
    core = make_engine(target, speculative_config=config, dtype="float32", num_threads=1)
    draft_always(core)
    seen = Seen(core, draft, monkeypatch)
    driver = Driver(core)
    driver.add("a", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    driver.finish()
    assert seen.proposed == seen.expected
    assert len(seen.proposed) > 3


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    target = make_model(tmp_path / "target", "llama")
    head, _ = draft_heads.eagle(tmp_path / "head", Target(target))
    wide = make_model(tmp_path / "wide", "llama", hidden_size=96)
    with pytest.raises(ConfigError, match="hidden states of size 64 and its target's have 96"):
        make_engine(wide, speculative_config={"method": "eagle", "model": str(head)})
    with pytest.raises(WeightMismatchError, match="the checkpoint does not fit Eagle; is it"):
        make_engine(target, speculative_config={"method": "eagle", "model": str(target)})
    with pytest.raises(QuireError, match=r"mtp.*LlamaForCausalLM.*DeepseekV3ForCausalLM"):
        make_engine(target, speculative_config={"method": "mtp"})
    bare = make_model(tmp_path / "bare", "deepseek_v3", **draft_heads.LATENT)
    with pytest.raises(ConfigError, match=r"no module that drafts \(no tensor model.layers.4.\*\)"):
        make_engine(bare, speculative_config={"method": "mtp"})
