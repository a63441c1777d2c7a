"""Recorded steps with a recorder that runs them anew, in Triton's interpreter: the same tokens as launched steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from quire.ops.base import Target
from quire.platform.cpu import CpuPlatform
from quire.types.sampling import SamplingParams
from quire.types.step import StepPlan
from quire.worker.input_batch import InputBatch
from quire.worker.request_rows import RequestRows
from tests.e2e.tiny import Driver, make_engine, make_model
from tests.kernels.triton.paged import needs_triton

pytestmark = needs_triton
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


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


def tokens_of(
    folder: Path, prompts: list[list[int]], params: SamplingParams = GREEDY, **settings: Any
) -> list[list[int]]:
    fixed = {"attention_backend": "triton", "max_num_seqs": 4, "max_model_len": 128, "kv_cache_memory": 1 << 20}
    core = make_engine(folder, **fixed, **settings)
    driver = Driver(core)
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt, params)
        if not settings:
            driver.step()
    answers = driver.finish()
    assert all(answer.error is None for answer in answers.values())
    return [answer.token_ids for answer in answers.values()]


def test_same_tokens_as_launched_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, another beside a decoding row, a prefix hit of few tokens, and pure decoding at the end."""
    stem = [3 + 5 * index % 190 for index in range(20)]
    prompts = [stem, [7, 8, 9], [*stem[:16], 11, 12]]
    launched = tokens_of(folder, prompts)
    monkeypatch.setattr(CpuPlatform, "graph_sizes", (1, 2, 4))
    monkeypatch.setattr(CpuPlatform, "narrow_above", None)
    monkeypatch.setattr("quire.worker.decode_graphs.Recorder", Rerun)
    monkeypatch.setattr("quire.worker.mixed_graphs.Recorder", Rerun)
    monkeypatch.setattr("quire.worker.mixed_graphs.SIZES", (32, 64))
    Rerun.recorded = 0
    assert tokens_of(folder, prompts) == launched
    assert Rerun.recorded >= 3


def test_full_prompt_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is the first part of a long prompt, one of two prompts, and one of all kinds of rows."""
    from quire.worker.mixed_graphs import MixedGraphs

    lengths = (20, 12, 14)
    prompts = [[3 + (7 * index + 11 * row) % 190 for index in range(count)] for row, count in enumerate(lengths)]
    limits = {"max_num_batched_tokens": 16, "long_prefill_token_threshold": 16}
    launched = tokens_of(folder, prompts, SHORT, **limits)
    kinds: list[tuple[bool, ...]] = []

    class Spied(MixedGraphs):
        def run(self, batch: InputBatch) -> Tensor | None:
            hidden = super().run(batch)
            if hidden is not None and batch.forward.wanted is not None:
                kinds[:] = [tuple(kind) for size, kind in self._graphs if size == 16]
            return hidden

    monkeypatch.setattr(CpuPlatform, "graph_sizes", (1, 2, 4))
    monkeypatch.setattr(CpuPlatform, "narrow_above", 4)
    monkeypatch.setattr("quire.attention.triton._FUSED_QUERIES", 15)
    monkeypatch.setattr("quire.attention.triton.FEW_QUERIES", 2)
    monkeypatch.setattr("quire.worker.decode_graphs.Recorder", Rerun)
    monkeypatch.setattr("quire.worker.mixed_graphs.Recorder", Rerun)
    monkeypatch.setattr("quire.worker.mixed_graphs.SIZES", (4,))
    monkeypatch.setattr("quire.worker.mixed_graphs.MixedGraphs", Spied)
    assert tokens_of(folder, prompts, SHORT, **limits) == launched
    assert {kind[3] for kind in kinds} == {False, True}, "with and without a whole prompt"
    assert any(kind[0] and kind[2] for kind in kinds), "prompts beside rows that decode"


def test_draws_and_even_attention(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.kernels.triton.sampling import draw_within

    class Kernel:
        """The op where it has a kernel."""

        reference = None

        @staticmethod
        def bind(target: Target) -> object:
            return draw_within

    prompts = [[3, 8, 13, 18, 23], [4, 9]]
    params = SamplingParams(temperature=0.9, top_k=9, top_p=0.8, min_p=0.01, max_tokens=3, ignore_eos=True, seed=2)
    launched = tokens_of(folder, prompts, params)
    monkeypatch.setattr(CpuPlatform, "graph_sizes", (1, 2, 4))
    monkeypatch.setattr("quire.worker.sampling.sampler.DRAW_WITHIN", Kernel)
    monkeypatch.setattr("quire.worker.decode_graphs.Recorder", Rerun)
    monkeypatch.setattr("quire.worker.mixed_graphs.Recorder", Rerun)
    monkeypatch.setattr("quire.worker.decode_graphs._MIN_EVEN_ROWS", 1)
    monkeypatch.setattr("quire.worker.decode_graphs._UNEVEN", 0.5)
    Rerun.recorded = 0
    assert tokens_of(folder, prompts, params) == launched
    assert Rerun.recorded >= 2


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
