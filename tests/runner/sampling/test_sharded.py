"""Ranks that share the vocabulary sample what one rank samples from all logits, and exchange candidates alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels.cpu import library
from quire.kernels.cpu.recording import KernelRecorder
from quire.parallel.collectives import NullCollectives
from quire.parallel.shared_memory import SharedMemory, SharedMemoryCollectives, collective_bytes
from quire.runner.sampling.sampler import Sampler
from quire.runner.sampling.sharded import MOST_CANDIDATES, VocabShard
from tests.models.test_tensor_parallel import ThreadCollectives
from tests.runner.sampling.helpers import CPU, MAX_ROWS, Rows, make_logits, make_row, rows_of, sample, start_of
from tests.runner.sampling.reference import Row

VOCAB = 301


class Noted(ThreadCollectives):
    """Notes how many columns each gather had."""

    def all_gather(self, x: Tensor, total: int) -> Tensor:
        self.widths = [*getattr(self, "widths", []), total]
        return super().all_gather(x, total)


def place(sampler: Sampler, rows: Sequence[Row]) -> Rows:
    state = Rows.empty()
    for index, row in enumerate(rows):
        state.place(index, row)
        sampler.add_request(index, start_of(index, row))
    sampler.apply_staged_writes()
    return state


def sample_by_ranks(logits: Tensor, rows: list[Row], ranks: int) -> tuple[list[Any], list[Noted]]:
    share, barrier, shared = -(-logits.shape[1] // ranks), threading.Barrier(ranks), [torch.empty(0)] * ranks
    links = [Noted(rank, barrier, shared) for rank in range(ranks)]

    def run(rank: int) -> Any:
        sampler = Sampler(logits.shape[1], MAX_ROWS, CPU, shard=VocabShard(rank * share, ranks, links[rank]))
        state, order = place(sampler, rows), list(range(len(rows)))
        mine = logits
        if sampler.kind(order, False).candidates:
            mine = logits[:, rank * share : (rank + 1) * share]
        return sample(sampler, mine, order, state)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks))), links


@settings(max_examples=40, deadline=None)
@given(data=st.data(), ranks=st.sampled_from([2, 3, 4]), rows=st.lists(rows_of(VOCAB), min_size=1, max_size=4))
def test_ranks_sample_what_one_does(data: st.DataObject, ranks: int, rows: list[Row]) -> None:
    logits = torch.from_numpy(make_logits(data.draw(st.integers(0, 99)), len(rows), VOCAB))
    one = Sampler(VOCAB, MAX_ROWS, CPU)
    expected = sample(one, logits, list(range(len(rows))), place(one, rows))
    for found in sample_by_ranks(logits, rows, ranks)[0]:
        assert found.found == expected.found
        assert found.entries == expected.entries


KINDS: list[tuple[dict[str, Any], int]] = [
    ({"temperature": 0.0}, 1),
    ({"temperature": 0.8}, 1),
    ({"temperature": 0.8, "top_k": 50}, MOST_CANDIDATES),
    ({"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.1}, MOST_CANDIDATES),
    ({"temperature": 0.8, "top_k": MOST_CANDIDATES + 1}, 0),
    ({"temperature": 0.8, "top_p": 0.9}, 0),
    ({"temperature": 0.8, "min_p": 0.1}, 0),
    ({"temperature": 0.0, "logprobs": 2}, 0),
    ({"temperature": 0.0, "presence_penalty": 0.5}, 0),
    ({"temperature": 0.0, "logit_bias": {4: 1.0}}, 0),
    ({"temperature": 0.0, "allowed_token_ids": [1, 2]}, 0),
]


@pytest.mark.parametrize(("params", "candidates"), KINDS)
def test_what_cannot_be_kept_by_candidates_takes_all_logits(params: dict[str, Any], candidates: int) -> None:
    sampler = Sampler(VOCAB, MAX_ROWS, CPU, shard=VocabShard(0, 2, NullCollectives()))
    place(sampler, [make_row(temperature=0.0), make_row(**params)])
    assert sampler.kind([0], False).candidates == 1
    assert sampler.kind([0, 1], False).candidates == sampler.kind([1], False).candidates == candidates
    assert sampler.kind([0, 1], masked=True).candidates == 0
    assert sampler.draft_kind([0, 1], False).candidates == 0
    sampler.remove_request(1)
    place(sampler, [make_row(temperature=0.0), make_row(temperature=0.0)])
    assert sampler.kind([0, 1], False).candidates == 1


def test_a_few_numbers_of_each_row_are_exchanged() -> None:
    logits = torch.from_numpy(make_logits(0, 2, VOCAB))
    for params, count in KINDS[:4]:
        _, links = sample_by_ranks(logits, [make_row(**params), make_row(temperature=0.0)], 2)
        assert [link.widths for link in links] == [[2 * (1 + 2 * count)]] * 2


@pytest.mark.skipif(library.load() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("params", "candidates"), KINDS[:4])
def test_a_list_of_kernel_calls_holds_it(params: dict[str, Any], candidates: int) -> None:
    memory = SharedMemory(collective_bytes(1))
    shard = VocabShard(0, 1, SharedMemoryCollectives(memory, 0, 1))
    sampler, rows = Sampler(VOCAB, MAX_ROWS, CPU, shard=shard), [make_row(**params, seed=seed) for seed in range(6)]
    state, logits = place(sampler, rows), torch.from_numpy(make_logits(1, 6, VOCAB))
    kind, places = sampler.kind(list(range(6)), False), torch.arange(6)
    recording = KernelRecorder().record(
        lambda count: [sampler.sample(kind, logits[:count], places[:count], state)], ((2,), (5,)), (6,)
    )
    expected = sample(sampler, logits, list(range(6)), state)
    for count in (3, 6):
        recording(count)
        assert recording.results[0][:count].tolist() == [list(pair) for pair in expected.found[:count]]
        state.num_tokens[:count] -= 1
    assert kind.candidates == candidates
    memory.close()
