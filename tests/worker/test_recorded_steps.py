"""Recorded steps with a recorder that runs them anew, in Triton's interpreter: the same tokens as launched steps."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from quire.engine.core import EngineCore
from quire.ops.base import Target
from quire.platform.cpu import CpuPlatform
from quire.platform.transfer import Download
from quire.types.masks import Masks
from quire.types.sampling import SamplingParams
from quire.types.step import StepPlan
from quire.types.structured import GrammarSource
from quire.worker.input_batch import InputBatch
from quire.worker.request_rows import RequestRows
from quire.worker.sampling.sampler import RecordedKind
from tests.e2e.tiny import VOCAB, Driver, make_engine, make_model
from tests.e2e.tiny_grammar import VOCABULARY, regex, text_of
from tests.kernels.triton.paged import needs_triton

pytestmark = needs_triton
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


class Rerun:
    """Records nothing: a replay runs the step again and leaves its result in the same place."""

    recorded = 0

    def record(self, step: Callable[[], Tensor], *, keep: bool = True) -> tuple[Callable[[], None], Tensor]:
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


@pytest.mark.parametrize("shared_from", [1, 99])
def test_full_prompt_steps(folder: Path, monkeypatch: pytest.MonkeyPatch, shared_from: int) -> None:
    """A step that is the first part of a long prompt, one of two prompts, and one of all kinds of rows.

    In its last layer wanted tokens are rows of one query each, whose keys may be shared among programs.
    """
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
    monkeypatch.setattr("quire.attention.triton.MIN_SHARED_ROWS", shared_from)
    monkeypatch.setattr("quire.attention.triton.multiprocessors", lambda: 1)
    monkeypatch.setattr("quire.worker.decode_graphs.Recorder", Rerun)
    monkeypatch.setattr("quire.worker.mixed_graphs.Recorder", Rerun)
    monkeypatch.setattr("quire.worker.mixed_graphs.SIZES", (4,))
    monkeypatch.setattr("quire.worker.mixed_graphs.MixedGraphs", Spied)
    assert tokens_of(folder, prompts, SHORT, **limits) == launched
    assert {kind[3] for kind in kinds} == {False, True}, "with and without a whole prompt"
    assert any(kind[0] and kind[2] for kind in kinds), "prompts beside rows that decode"


@pytest.mark.parametrize("alike", [False, True])
def test_draws_with_keys_shared_evenly_or_a_program_each(
    folder: Path, monkeypatch: pytest.MonkeyPatch, alike: bool
) -> None:
    prompts = [[3, 8, 13, 18, 23], [4, 9]]
    params = SamplingParams(temperature=0.9, top_k=9, top_p=0.8, min_p=0.01, max_tokens=3, ignore_eos=True, seed=2)
    launched = tokens_of(folder, prompts, params)
    record_steps(monkeypatch)
    monkeypatch.setattr("quire.attention.triton.MIN_SHARED_ROWS", 1)
    monkeypatch.setattr("quire.attention.triton._fills", lambda programs: True)
    monkeypatch.setattr("quire.worker.decode_graphs._MIN_ROWS", 1)
    monkeypatch.setattr("quire.worker.decode_graphs._ALIKE", 99.0 if alike else 0.5)
    Rerun.recorded = 0
    assert tokens_of(folder, prompts, params) == launched
    assert Rerun.recorded >= 2


class Kernel:
    """The op `draw_within` where it has a kernel."""

    reference = None

    @staticmethod
    def bind(target: Target) -> object:
        from quire.kernels.triton.sampling import draw_within

        return draw_within


def record_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "graph_sizes", (1, 2, 4))
    monkeypatch.setattr("quire.worker.sampling.sampler.DRAW_WITHIN", Kernel)
    monkeypatch.setattr("quire.worker.sampling.sampler.KEEP_ALLOWED", Kernel)
    monkeypatch.setattr("quire.worker.decode_graphs.Recorder", Rerun)
    monkeypatch.setattr("quire.worker.mixed_graphs.Recorder", Rerun)


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    params: SamplingParams
    grammar: GrammarSource | None = None


def ask(folder: Path, requests: list[Asked], **settings: Any) -> tuple[list[object], EngineCore]:
    """What is answered when a request comes at each step."""
    fixed = {"attention_backend": "triton", "max_num_seqs": 4, "max_model_len": 64, "kv_cache_memory": 1 << 20}
    core = make_engine(folder, **{**fixed, **settings})
    core.constraints.set_vocabulary(VOCABULARY)
    driver = Driver(core)
    for index, request in enumerate(requests):
        fields = {} if request.grammar is None else {"grammar": request.grammar}
        driver.add(str(index), request.prompt, request.params, **fields)
        wait_for_grammars(core)
        driver.step()
    answers = driver.finish().values()
    assert all(answer.error is None for answer in answers)
    return [(answer.token_ids, answer.logprobs, answer.finish_reason) for answer in answers], core


def wait_for_grammars(core: EngineCore) -> None:
    ready = threading.Event()
    core.constraints.when_ready(ready.set)
    assert not core.constraints.is_holding or core.constraints.has_news or ready.wait(30)


class SpiedGraphs:
    """Counts the recorded steps of each kind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from quire.worker.decode_graphs import DecodeGraphs

        self.kinds: Counter[RecordedKind] = Counter()
        spy = self

        class Spied(DecodeGraphs):
            def sample(self) -> Download:
                assert self._loaded_kind is not None
                spy.kinds[self._loaded_kind] += 1
                return super().sample()

        monkeypatch.setattr("quire.worker.decode_graphs.DecodeGraphs", Spied)


MASKED = [
    Asked([3, 8, 13], SamplingParams(temperature=0.0, max_tokens=3), regex("[a-c]{2,4}x")),
    Asked([4, 9], SamplingParams(temperature=1.2, top_k=20, seed=3, max_tokens=3, ignore_eos=True)),
    Asked([5, 6, 7], SamplingParams(temperature=1.5, top_p=0.9, seed=4, max_tokens=3), regex("[0-9]{3,9}")),
]


def test_masked_rows_beside_free_ones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched, _ = ask(folder, MASKED)
    record_steps(monkeypatch)
    spied = SpiedGraphs(monkeypatch)
    recorded, _ = ask(folder, MASKED, steps_in_flight=2)
    assert recorded == launched
    assert spied.kinds[RecordedKind(draws=True, masked=True)] >= 2
    first, _, third = launched
    assert re.fullmatch("[a-c]{3}", text_of(first[0]))
    assert re.fullmatch("[0-9]{3}", text_of(third[0]))


@pytest.mark.nightly
def test_masked_rows_are_preempted_and_go_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are three blocks of 4 KiB and a null one, of which each request needs two in the end."""
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=20, ignore_eos=True)
    requests = [Asked([3 + row] * 12, params, regex("([a-f]|[0-9])*")) for row in range(2)]
    launched, _ = ask(folder, requests)
    record_steps(monkeypatch)
    spied = SpiedGraphs(monkeypatch)
    recorded, core = ask(folder, requests, kv_cache_memory=16 << 10, max_model_len=33)
    assert recorded == launched
    assert core.scheduler.stats().num_preemptions > 0
    assert spied.kinds[RecordedKind(draws=True, masked=True)] > 10


def test_a_row_whose_grammar_leaves_no_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails alone, and the message is that of a step sampled from the host."""
    record_steps(monkeypatch)
    core = make_engine(folder, attention_backend="triton", max_num_seqs=4, max_model_len=64, kv_cache_memory=1 << 20)
    core.constraints.set_vocabulary(VOCABULARY)
    nothing = np.zeros((1, -(-VOCAB // 32)), dtype=np.int32)
    driver = Driver(core)
    driver.add("masked", [3, 4], SamplingParams(temperature=0.0, max_tokens=5), grammar=regex("a*"))
    driver.add("free", [5, 6], GREEDY)
    wait_for_grammars(core)
    driver.step()
    made: Future[Masks] = Future()
    made.set_result(nothing)
    monkeypatch.setattr(core.constraints, "start_masks", lambda requests: made)
    answers = driver.finish()
    assert answers["masked"].error is not None
    assert "no token may be chosen" in answers["masked"].error
    assert answers["free"].error is None
    assert len(answers["free"].token_ids) == 3


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
