"""Recorded steps with a recorder that runs them anew, in Triton's interpreter: the same tokens as launched steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from quire.platform.cpu import CpuPlatform
from quire.types.sampling import SamplingParams
from quire.types.step import StepPlan
from quire.worker.request_rows import RequestRows
from tests.e2e.tiny import Driver, make_engine, make_model
from tests.kernels.triton.paged import needs_triton

pytestmark = needs_triton
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


class Rerun:
    """Records nothing: a replay runs the step again and leaves its result in the same place."""

    recorded = 0

    def record(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        Rerun.recorded += 1
        out = step().clone()

        def replay() -> None:
            out.copy_(step())

        return replay, out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model(tmp_path, "llama", num_hidden_layers=1, head_dim=16)


def tokens_of(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    core = make_engine(folder, attention_backend="triton", max_num_seqs=4, max_model_len=128, kv_cache_memory=1 << 20)
    driver = Driver(core)
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt, GREEDY)
        driver.step()
    return [answer.token_ids for answer in driver.finish().values()]


def test_same_tokens_as_launched_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, another beside a decoding row, a prefix hit of few tokens, and pure decoding at the end."""
    stem = [3 + 5 * index % 190 for index in range(20)]
    prompts = [stem, [7, 8, 9], [*stem[:16], 11, 12]]
    launched = tokens_of(folder, prompts)
    monkeypatch.setattr(CpuPlatform, "graph_sizes", (1, 2, 4))
    monkeypatch.setattr("quire.worker.decode_graphs.Recorder", Rerun)
    monkeypatch.setattr("quire.worker.mixed_graphs.Recorder", Rerun)
    monkeypatch.setattr("quire.worker.mixed_graphs.SIZES", (32, 64))
    Rerun.recorded = 0
    assert tokens_of(folder, prompts) == launched
    assert Rerun.recorded >= 3


def test_a_chunk_of_one_token_is_no_decode_step() -> None:
    """Only a row that catches up samples; the scheduler may also give a long prompt a single token."""
    from quire.worker.decode_graphs import DecodeGraphs

    graphs = DecodeGraphs.__new__(DecodeGraphs)
    rows = RequestRows(2, 64, CpuPlatform.device)
    graphs._rows, graphs._sizes = rows, (1, 2)
    rows.host_num_tokens[:2] = [10, 10]
    rows.host_num_computed[:2] = [9, 9]
    assert graphs.takes(StepPlan(0, [0, 1], [1, 1]))
    assert not graphs.takes(StepPlan(0, [0, 1], [1, 2]))
    rows.host_num_computed[1] = 4
    assert not graphs.takes(StepPlan(0, [0, 1], [1, 1]))
