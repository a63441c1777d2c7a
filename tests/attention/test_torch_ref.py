"""The torch backend: right against dense attention, and the same bits however a sequence is cut and batched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionSpec, LayerCache, make_batch
from quire.attention.torch_ref import TorchAttention

BLOCK = 16


def dense(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one whole sequence in float64."""
    n = q.shape[0]
    q, k, v = q.double(), k.double(), v.double()
    k, v = (t.repeat_interleave(spec.group_size, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    distance = torch.arange(n)[:, None] - torch.arange(n)[None, :]
    hidden = distance < 0
    if spec.sliding_window is not None and spec.chunked:
        chunk = torch.arange(n) // spec.sliding_window
        hidden |= chunk[:, None] != chunk[None, :]
    elif spec.sliding_window is not None:
        hidden |= distance >= spec.sliding_window
    scores = scores.masked_fill(hidden, -torch.inf)
    if spec.sinks is not None:  # one more key for all queries, without a value
        scores = torch.cat([scores, spec.sinks.double().view(-1, 1, 1).expand(-1, n, 1)], dim=-1)
    weights = scores.softmax(-1)[..., :n]
    return torch.einsum("hqk,khd->qhd", weights, v).reshape(n, -1)


class Sequences:
    """Random sequences with scattered blocks, run step by step through one backend."""

    def __init__(
        self,
        spec: AttentionSpec,
        lengths: list[int],
        seed: int = 0,
        backend: AttentionBackend | None = None,
        dtype: torch.dtype = torch.float32,
        block_size: int = BLOCK,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.spec, self.lengths, self.backend = spec, lengths, backend or TorchAttention()
        self.block_size = block_size
        blocks = [-(-n // block_size) for n in lengths]
        order = 1 + torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(seed + 1))
        shape = self.backend.cache_shape(sum(blocks) + 1, block_size, spec.num_kv_heads, spec.head_dim, dtype)
        self.cache = torch.zeros(shape, dtype=dtype)
        self.tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
        for row, part in enumerate(order.split(blocks)):
            self.tables[row, : len(part)] = part
        self.q = [torch.randn(n, spec.num_heads, spec.head_dim, generator=generator) for n in lengths]
        self.k = [torch.randn(n, spec.num_kv_heads, spec.head_dim, generator=generator) for n in lengths]
        self.v = [torch.randn(n, spec.num_kv_heads, spec.head_dim, generator=generator) for n in lengths]
        self.out = [torch.full((n, spec.num_heads * spec.head_dim), torch.nan) for n in lengths]
        self.done = [0] * len(lengths)

    def step(self, counts: dict[int, int]) -> None:
        """Compute the next counts[row] tokens of each row, in one batch in the dict's order."""
        rows, size = list(counts), self.block_size
        spans = {row: slice(self.done[row], self.done[row] + counts[row]) for row in rows}
        positions = [torch.arange(s.start, s.stop) for s in spans.values()]
        slots = torch.cat(
            [self.tables[r, p // size].long() * size + p % size for r, p in zip(rows, positions, strict=True)]
        )
        batch = make_batch(
            query_lens=[counts[r] for r in rows],
            context_lens=[spans[r].stop for r in rows],
            block_tables=self.tables[rows],
            slot_mapping=torch.cat([slots, torch.zeros(3, dtype=torch.int64)]),  # three padding tokens
            block_size=size,
        )
        q, k, v = (
            torch.cat([*(t[r][spans[r]] for r in rows), torch.ones(3, *t[0].shape[1:])])
            for t in (self.q, self.k, self.v)
        )
        at = LayerCache(self.spec, self.cache, self.backend.prepare_eager(batch))
        qkv = torch.cat([t.flatten(1) for t in (q, k, v)], dim=1)
        out = self.backend.attend(at, self.backend.write(at, qkv, None, None))
        assert not out[-3:].any()
        start = 0
        for row in rows:
            self.out[row][spans[row]] = out[start : start + counts[row]]
            start += counts[row]
            self.done[row] += counts[row]


SPECS = [
    AttentionSpec(4, 2, 16, 0.25),
    AttentionSpec(9, 3, 64, 0.125),
    AttentionSpec(2, 2, 80, 0.1),
    AttentionSpec(4, 1, 32, 0.2, sliding_window=24),
    AttentionSpec(4, 4, 128, 0.1, soft_cap=5.0),
    AttentionSpec(4, 2, 32, 0.2, sliding_window=50, chunked=True),
    AttentionSpec(8, 2, 256, 0.05, sliding_window=7, soft_cap=20.0),
]

SINKS = AttentionSpec(4, 2, 32, 0.2, sliding_window=24, sinks=torch.tensor([-1.0, 0.5, 3.0, 120.0]))


@pytest.mark.parametrize("spec", [*SPECS, SINKS], ids=str)
def test_matches_dense_attention(spec: AttentionSpec) -> None:
    sequences = Sequences(spec, [1, 17, 300, 128])
    sequences.step({2: 150, 1: 17, 0: 1})
    sequences.step({3: 128, 2: 149})
    sequences.step({2: 1})
    for row in range(4):
        expected = dense(spec, sequences.q[row], sequences.k[row], sequences.v[row])
        torch.testing.assert_close(sequences.out[row].double(), expected, atol=2e-5, rtol=1e-4)


@settings(max_examples=15, deadline=None)
@given(data=st.data(), spec=st.sampled_from(SPECS))
def test_any_schedule_gives_the_same_bits(data: st.DataObject, spec: AttentionSpec) -> None:
    lengths = data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=5))
    whole = Sequences(spec, lengths)
    for row, n in enumerate(lengths):
        whole.step({row: n})
    cut = Sequences(spec, lengths)
    while any(d < n for d, n in zip(cut.done, lengths, strict=True)):
        open_rows = [r for r, n in enumerate(lengths) if cut.done[r] < n]
        chosen = data.draw(st.lists(st.sampled_from(open_rows), min_size=1, unique=True))
        cut.step({r: data.draw(st.integers(1, lengths[r] - cut.done[r])) for r in chosen})
    for a, b in zip(whole.out, cut.out, strict=True):
        assert torch.equal(a, b)


def test_decode_one_token_at_a_time_gives_the_same_bits() -> None:
    for spec in SPECS:
        whole, single = Sequences(spec, [140, 33]), Sequences(spec, [140, 33])
        whole.step({0: 140, 1: 33})
        for position in range(140):
            single.step({0: 1, 1: 1} if position < 33 else {0: 1})
        assert torch.equal(whole.out[0], single.out[0])
        assert torch.equal(whole.out[1], single.out[1])
