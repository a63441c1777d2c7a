"""The Triton backend against the torch backend: the same steps, each into a cache of its own layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionSpec, HeadNorm, LayerCache, make_batch
from quire.attention.torch_ref import TorchAttention
from quire.types.errors import ConfigError
from tests.attention.test_torch_ref import dense
from tests.kernels.device import DEVICE, NATIVE
from tests.kernels.triton.paged import SINKS, assert_close, int32, needs_triton, seeing

pytestmark = needs_triton
BLOCK = 16


class Steps:
    """Random steps of the same rows for any backend."""

    def __init__(self, spec: AttentionSpec, lengths: list[int], *, norm: bool) -> None:
        self.spec, self.lengths = spec, lengths
        self.generator = torch.Generator().manual_seed(0)
        blocks = [-(-n // BLOCK) for n in lengths]
        self.num_blocks = 1 + sum(blocks)
        order = 1 + torch.randperm(sum(blocks), generator=self.generator)
        self.tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
        for row, part in enumerate(order.split(blocks)):
            self.tables[row, : len(part)] = part.int()
        weights = torch.randn(2, spec.head_dim, generator=self.generator)
        self.norm = (weights[0], weights[1], 1e-6, 1.0) if norm else None

    def inputs(self, num_tokens: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        spec = self.spec
        qkv = torch.randn(
            num_tokens, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, generator=self.generator
        )
        angles = torch.rand(num_tokens, 1, spec.head_dim // 2, generator=self.generator)
        return qkv, (torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1))


def run(
    backend: AttentionBackend, steps: Steps, device: torch.device, plans: list[tuple[list[int], list[int]]]
) -> list[Tensor]:
    """Each plan is (rows, their context after the step); a row's tokens are those it lacks."""
    sinks = None if steps.spec.sinks is None else steps.spec.sinks.to(device)
    spec = replace(steps.spec, sinks=sinks)
    steps.generator.manual_seed(1)
    shape = backend.cache_shape(steps.num_blocks, BLOCK, spec.num_kv_heads, spec.head_dim)
    cache, done, results = torch.zeros(shape, device=device), [0] * len(steps.lengths), []
    norm = None if steps.norm is None else HeadNorm(*(w.to(device) for w in steps.norm[:2]), *steps.norm[2:])
    for rows, contexts in plans:
        counts = [context - done[row] for row, context in zip(rows, contexts, strict=True)]
        qkv, (cos, sin) = steps.inputs(sum(counts))
        slots = []
        for row, context in zip(rows, contexts, strict=True):
            at = torch.arange(done[row], context)
            slots.append(steps.tables[row, at // BLOCK].long() * BLOCK + at % BLOCK)
            done[row] = context
        tables = steps.tables[rows].to(device)
        metadata = backend.prepare_eager(make_batch(counts, contexts, tables, torch.cat(slots).to(device), BLOCK))
        rotation = (cos.to(device), sin.to(device))
        at_step = LayerCache(spec, cache, metadata)
        results.append(backend.attend(at_step, backend.write(at_step, qkv.to(device), norm, rotation)).cpu())
    return results


@pytest.mark.parametrize(
    ("window", "cap", "norm"), [(None, None, True), (20, None, False), (None, 5.0, True), (-12, None, True)]
)
def test_same_as_the_torch_backend(window: int | None, cap: float | None, norm: bool) -> None:
    from quire.attention.triton import TritonAttention

    steps = Steps(seeing(AttentionSpec(2, 1, 32, 0.2, soft_cap=cap), window), [4, 42, 20, 2, 18], norm=norm)
    plans = [([0, 1, 2], [3, 21, 17]), ([4, 3, 1, 2], [17, 1, 40, 20]), ([0, 1, 3, 4], [4, 42, 2, 18])]
    expected = run(TorchAttention(), steps, torch.device("cpu"), plans)
    for mine, theirs in zip(run(TritonAttention(), steps, DEVICE, plans), expected, strict=True):
        assert_close(mine, theirs)


@pytest.mark.parametrize(
    "spec", [AttentionSpec(2, 1, 32, 0.2), AttentionSpec(2, 1, 32, 0.2, sinks=SINKS[:2], norms_rotated=True)]
)
def test_a_long_prompt_by_itself_and_beside_others(spec: AttentionSpec) -> None:
    """From some length on a whole prompt takes torch's fused attention; its last layer's keys must not linger.

    With sinks it does not, and takes tiles like any other.
    """
    from quire.attention.triton import TritonAttention

    class Small(TritonAttention):
        fused_queries = 20

    steps = Steps(spec, [26, 20, 2, 37], norm=True)
    plans = [([0], [25]), ([1, 2, 3, 0], [20, 1, 18, 26]), ([3, 2], [37, 2])]
    expected = run(TorchAttention(), steps, torch.device("cpu"), plans)
    for mine, theirs in zip(run(Small(), steps, DEVICE, plans), expected, strict=True):
        assert_close(mine, theirs, 1e-4)


def test_heal_makes_blocks_finite_and_leaves_others() -> None:
    from quire.attention.triton import TritonAttention

    cache = torch.full((2, 4, 1, BLOCK, 8), float("nan"), device=DEVICE)
    cache[:, 2, :, 0] = 5.0
    TritonAttention().heal(cache, torch.tensor([2, 3], device=DEVICE))
    assert bool(cache[:, 2:].isfinite().all())
    assert bool((cache[:, 2, :, 0] == 5.0).all())
    assert bool(cache[:, :2].isnan().all())


def huge_cache(folder: Path, kv_heads: int, dim: int, blocks: int) -> Tensor:
    """More than 2^31 elements, of which only what is used takes memory: values lie one block after keys."""
    page = kv_heads * BLOCK * dim
    count = (blocks + 1) * page
    if NATIVE:
        storage = torch.empty(count, dtype=torch.float16, device=DEVICE)
    else:
        storage = torch.from_numpy(np.memmap(folder / "cache", np.float16, "w+", shape=(count,)))
    return storage.as_strided((2, blocks, kv_heads, BLOCK, dim), (page, page, BLOCK * dim, dim, 1))


def test_a_cache_of_more_than_two_billion_elements(tmp_path: Path) -> None:
    from quire.kernels.triton.decode_attention import decode_attention
    from quire.kernels.triton.prefill_attention import prefill_attention
    from quire.kernels.triton.qkv import prepare_qkv

    spec = AttentionSpec(2, 1, 32, 0.2)
    blocks = (1 << 31) // (BLOCK * 32) + 8
    if NATIVE and torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GiB of device memory")
    cache = huge_cache(tmp_path, 1, 32, blocks)
    table = torch.tensor([[blocks - 2, blocks - 4]])
    at = torch.arange(20)
    slots = table[0, at // BLOCK] * BLOCK + at % BLOCK
    qkv = torch.randn(20, 4 * 32, generator=torch.Generator().manual_seed(0)).half().float()
    query = prepare_qkv(qkv.to(DEVICE), None, None, 0.0, 0.0, None, slots.to(DEVICE), cache, 2, qkv.dtype)
    heads = qkv.view(20, 4, 32)
    expected = dense(spec, heads[:, :2], heads[:, 2:3], heads[:, 3:]).float()
    shared = (torch.zeros(1, dtype=torch.int64, device=DEVICE), int32([20]), int32([0, 20]))
    tables, every = table.int().to(DEVICE), list(range(20))
    out = torch.zeros(20, 64, device=DEVICE)
    decode_attention(
        query, cache, tables, int32([0] * 20), int32(every), *shared, out, 0.2, None, 0, splits=1, keys=32
    )
    assert_close(out, expected)
    out = torch.zeros(20, 64, device=DEVICE)
    tiles = (int32([0, 0]), int32([0, 16]))
    prefill_attention(query, cache, tables, *shared, *tiles, out, 0.2, None, 0, query_tile=16, keys=32)
    assert_close(out, expected)


def test_a_machine_without_a_gpu_is_refused_at_the_start() -> None:
    from quire.attention.triton import TritonAttention

    class Nowhere(TritonAttention):
        unavailable = staticmethod(lambda: "there is no GPU")

    TritonAttention().start()
    with pytest.raises(ConfigError, match=r"attention_backend is 'triton', but there is no GPU; leave --attention"):
        Nowhere().start()
