"""Heads on a GPU: drafts out of CUDA graphs are those of eager steps, also of a head that is seldom asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.engine.core import EngineCore
from quire.runner.cuda_graphs import CudaGraphs
from quire.runner.proposers.heads import HeadProposer
from quire.sched.drafts import Drafts
from tests.e2e.test_draft_heads import Seldom
from tests.e2e.tiny import make_engine
from tests.gpu.helpers import needs_gpu
from tests.runner.engines import run_eagerly, runner_of
from tests.runner.test_kept_hidden import Read, answers, drafter

pytestmark = needs_gpu


def heads_of(core: EngineCore) -> HeadProposer:
    proposer = runner_of(core).proposer
    assert isinstance(proposer, HeadProposer)
    return proposer


@pytest.mark.parametrize("every", [1, 5])
def test_captured_heads_propose_what_eager_ones_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    sizes = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    target, config = drafter(tmp_path, "eagle3", **sizes)
    settings = {"device": "cuda", "deterministic": True, "max_model_len": 128, "max_num_seqs": 4}
    reads, found = [], []
    for captured in (True, False):
        core = make_engine(target, speculative_config={**config, "num_speculative_tokens": 4}, **settings)
        drafting = core.scheduler._state.drafting
        assert isinstance(drafting, Drafts)
        core.scheduler._state.drafting = Drafts(*drafting._drafters, most=3, lengths=Seldom(every))
        if not captured:
            run_eagerly(core)
            heads_of(core)._runner.ways = heads_of(core)._runner.ways[-1:]
        reads.append(Read(core, monkeypatch))
        found.append({name: answer.token_ids for name, answer in answers(core, 40).items()})
        if captured:
            (graphs,) = (way for way in heads_of(core)._runner.ways if isinstance(way, CudaGraphs))
            assert graphs._chains
        core.shutdown()
    assert found[0] == found[1]
    assert reads[0].proposals == reads[1].proposals
    assert sum(map(len, reads[0].proposals)) > 8
