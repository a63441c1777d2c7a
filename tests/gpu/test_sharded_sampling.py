"""Sampling from candidates on the GPU: captured with NCCL, and by two processes that share device memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from quire.ops.base import Target
from quire.ops.candidates import OFFER_CANDIDATES, SAMPLE_AMONG
from quire.ops.sample import SAMPLE_WITHIN
from quire.runner.sampling.sampler import Sampler
from quire.runner.sampling.sharded import VocabShard
from tests.gpu.helpers import needs_gpu
from tests.runner.sampling.helpers import Rows, make_row, sample, start_of

pytestmark = needs_gpu
ROWS, VOCAB = 12, 151_937
KINDS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.8, "top_k": 50}]


def make_logits(seed: int) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(ROWS, VOCAB, generator=generator, device="cuda", dtype=torch.bfloat16) * 4


def placed(sampler: Sampler, params: dict[str, Any]) -> Rows:
    state = Rows.empty(device=torch.device("cuda"))
    for index in range(ROWS):
        row = make_row(seed=index, **params)
        state.place(index, row)
        sampler.add_request(index, start_of(index, row))
    sampler.apply_staged_writes()
    return state


@pytest.mark.parametrize("params", KINDS)
def test_a_captured_exchange_chooses_what_all_logits_do(params: dict[str, Any], tmp_path: Path) -> None:
    from quire.parallel.nccl import start_nccl

    device, order = torch.device("cuda"), list(range(ROWS))
    shard = VocabShard(0, 1, start_nccl(device, 0, 1, str(tmp_path / "store")))
    whole, sharded = Sampler(VOCAB, ROWS, device), Sampler(VOCAB, ROWS, device, shard=shard)
    states, logits, rows = [placed(each, params) for each in (whole, sharded)], make_logits(0), torch.arange(ROWS)
    kind, rows = sharded.kind(order, False), rows.cuda()
    assert kind.candidates
    kept = states[1].num_tokens.clone()
    sharded.sample(kind, logits, rows, states[1])  # compiles, and opens the group
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sharded.sample(kind, logits, rows, states[1])
    for seed in (1, 2, 3):
        logits.copy_(make_logits(seed))
        states[1].num_tokens.copy_(kept)
        graph.replay()
        torch.cuda.synchronize()
        expected = sample(whole, logits, order, states[0])
        assert [tuple(pair) for pair in out.tolist()] == expected.found


def offer(rank: int, shared: Tensor, barrier: Any, sampled: tuple[Tensor, ...], failed: Any) -> None:
    """A process of its own: writes what it offers of its half into memory of the first one's GPU."""
    try:
        share = -(-VOCAB // 2)
        part = make_logits(7)[:, rank * share : (rank + 1) * share].contiguous()
        shared[rank].copy_(OFFER_CANDIDATES.bind(Target("cuda"))(part, rank * share, 64, sampled))
        torch.cuda.synchronize()
    except BaseException:
        failed.set()
        raise
    finally:
        barrier.wait(60)


def test_two_processes_on_one_gpu_choose_what_all_logits_do() -> None:
    context = mp.get_context("spawn")
    shared = torch.zeros(2, ROWS, 129, device="cuda")  # the other process opens it by its CUDA IPC handle
    parameters = torch.tensor(
        [[0.9, -torch.inf, float(row % 3 * 25), 1.0] for row in range(ROWS)], dtype=torch.float64
    )
    sampled = (parameters.T.contiguous().cuda(), torch.arange(ROWS).cuda() * 91, torch.arange(ROWS).cuda())
    barrier, failed = context.Barrier(2), context.Event()
    other = context.Process(target=offer, args=(1, shared, barrier, sampled, failed))
    other.start()
    offer(0, shared, barrier, sampled, failed)
    offers = torch.cat([shared[0], shared[1]], dim=1)
    tokens, highest = SAMPLE_AMONG.bind(Target("cuda"))(offers, 2, sampled)
    expected, expected_highest = SAMPLE_WITHIN.bind(Target("cuda"))(make_logits(7), *sampled)
    other.join(60)
    assert not failed.is_set()
    assert other.exitcode == 0
    assert torch.equal(tokens, expected)
    assert torch.equal(highest, expected_highest)
