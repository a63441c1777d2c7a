"""What drafters read of every token comes out of recorded steps: the bits of eager ones, in fixed buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.engine.core import EngineCore
from quire.runner.cuda_graphs import CudaGraphs
from quire.runner.kernel_list import KernelList
from quire.runner.proposers.heads import HeadProposer
from quire.types.errors import ConfigError
from quire.types.sampling import SamplingParams
from quire.types.step import StepPlan, StepResult
from tests.e2e import draft_heads
from tests.e2e.draft_heads import Target
from tests.e2e.drafting import draft_always
from tests.e2e.tiny import Answer, Driver, make_engine, make_model
from tests.kernels.triton.paged import needs_triton
from tests.runner.engines import Rerun, capture_steps, run_eagerly, runner_of, spy_on

PROMPTS = [[3 + (7 * at + 11 * n) % 190 for at in range(length)] for n, length in enumerate((21, 3, 1))]


def drafter(folder: Path, name: str, **sizes: Any) -> tuple[Path, dict[str, Any]]:
    """A target, and the settings of what drafts for it."""
    if name == "mtp":
        return draft_heads.mtp_deepseek(folder / "target")[0], {"method": "mtp", "num_speculative_tokens": 2}
    target = make_model(folder / "target", "llama", num_hidden_layers=2, **sizes)
    make = {"eagle": draft_heads.eagle, "eagle3": draft_heads.eagle3, "medusa": draft_heads.medusa}[name]
    fields = sizes if name == "eagle" else {**sizes, "taps": (0, 1, 1)} if name == "eagle3" else {}
    head, _ = make(folder / "head", Target(target), **fields)
    return target, {"method": name, "model": str(head), "num_speculative_tokens": 2}


class Read:
    """Notes what each step handed to the proposer of an engine, and what that proposed."""

    def __init__(self, core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hidden: list[Tensor] = []
        self.proposals: list[dict[int, list[int]]] = []
        self._proposer = runner_of(core).proposer
        self._propose = self._proposer.propose
        monkeypatch.setattr(self._proposer, "propose", self._note)

    def _note(self, plan: StepPlan, result: StepResult, hidden: Tensor | None) -> dict[int, list[int]]:
        assert hidden is not None
        self.hidden.append(hidden[: sum(plan.num_tokens)].clone())
        self.proposals.append(self._propose(plan, result, hidden))
        return self.proposals[-1]


def answers(core: EngineCore, num_tokens: int, prompts: list[list[int]] = PROMPTS) -> dict[str, Answer]:
    """Prompts that come one after the other, so that some steps decode and some do not."""
    driver = Driver(core)
    for index, prompt in enumerate(prompts):
        driver.add(
            str(index), prompt, SamplingParams(temperature=0.9, seed=index, max_tokens=num_tokens, ignore_eos=True)
        )
        driver.step()
    return driver.finish()


@pytest.mark.parametrize("name", ["eagle", "eagle3", "medusa", "mtp"])
def test_kernel_lists_give_the_bits_of_eager_steps(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, config = drafter(tmp_path, name)
    cores = [make_engine(target, speculative_config=config, max_num_batched_tokens=16) for _ in range(2)]
    for core in cores:
        draft_always(core)
    reads = [Read(core, monkeypatch) for core in cores]
    spy = spy_on(cores[0])
    run_eagerly(cores[1])
    recorded, eager = (answers(core, 8) for core in cores)
    assert isinstance(spy.way, KernelList)
    assert spy.ran
    assert not spy.refused
    proposer = runner_of(cores[0]).proposer
    if isinstance(proposer, HeadProposer):
        (steps,) = (way for way in proposer._runner.ways if isinstance(way, KernelList))
        assert steps.is_recorded
        assert steps._chains
        assert None not in steps._chains.values()
    assert {key: answer.content() for key, answer in recorded.items()} == {
        key: answer.content() for key, answer in eager.items()
    }
    for mine, other in zip(reads[0].hidden, reads[1].hidden, strict=True):
        assert torch.equal(mine, other)
    assert reads[0].proposals == reads[1].proposals
    assert sum(map(len, reads[0].proposals)) > 8


@needs_triton
@pytest.mark.parametrize("name", ["eagle3", pytest.param("eagle", marks=pytest.mark.nightly)])
def test_cuda_graphs_give_what_eager_steps_do(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the target, and of the head's own steps, with a pool that runs the work anew in Triton's interpreter."""
    target, config = drafter(tmp_path, name, num_attention_heads=1, num_key_value_heads=1)
    settings = {"attention_backend": "triton", "max_num_seqs": 2, "max_model_len": 32, "kv_cache_memory": 1 << 20}

    def run() -> tuple[EngineCore, Read, dict[str, Answer]]:
        core = make_engine(target, speculative_config=config, dtype="float32", **settings)
        draft_always(core)
        read = Read(core, monkeypatch)
        return core, read, answers(core, 4, [[7, 8, 9]])

    _, eager, expected = run()
    capture_steps(monkeypatch, mixed=(4,))
    core, captured, found = run()
    proposer = runner_of(core).proposer
    assert isinstance(proposer, HeadProposer)
    graphs, of_head = (
        next(way for way in runner.ways if isinstance(way, CudaGraphs))
        for runner in (runner_of(core), proposer._runner)
    )
    assert {key.is_decode for key in graphs._forwards} == {True, False}
    assert of_head._forwards
    assert {count for *_, count in of_head._chains} == {1}, "drafts behind the first are one graph"
    assert {key: answer.token_ids for key, answer in found.items()} == {
        key: answer.token_ids for key, answer in expected.items()
    }
    assert captured.proposals == eager.proposals
    for mine, other in zip(captured.hidden, eager.hidden, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
    assert Rerun.captured


def test_layers_that_a_target_does_not_have_are_refused(tmp_path: Path) -> None:
    target = make_model(tmp_path / "target", "llama", num_hidden_layers=4)
    head, _ = draft_heads.eagle3(tmp_path / "head", Target(target), taps=(1, 2, 4))
    with pytest.raises(ConfigError, match=r"reads layers \(1, 2, 4\) of its target, which has 4"):
        make_engine(target, speculative_config={"method": "eagle3", "model": str(head)})
