"""The native backend: right against dense attention, and the same bits however a sequence is cut and batched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.attention.base import AttentionSpec, HeadNorm, make_batch
from quire.attention.cpu_native import NativeAttention
from quire.attention.torch_ref import TorchAttention
from quire.kernels.cpu import library
from tests.attention.test_torch_ref import SPECS, Sequences, dense

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason="needs a C++ compiler")


@pytest.mark.parametrize("spec", [*SPECS, AttentionSpec(3, 1, 37, 0.3)], ids=str)
def test_matches_dense_attention(spec: AttentionSpec) -> None:
    sequences = Sequences(spec, [1, 17, 300, 128], backend=NativeAttention())
    sequences.step({2: 150, 1: 17, 0: 1})
    sequences.step({3: 128, 2: 149})
    sequences.step({2: 1})
    for row in range(4):
        expected = dense(spec, sequences.q[row], sequences.k[row], sequences.v[row])
        torch.testing.assert_close(sequences.out[row].double(), expected, atol=2e-5, rtol=1e-4)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), spec=st.sampled_from(SPECS))
def test_any_schedule_gives_the_same_bits(data: st.DataObject, spec: AttentionSpec) -> None:
    lengths = data.draw(st.lists(st.integers(1, 100), min_size=1, max_size=5))
    whole = Sequences(spec, lengths, backend=NativeAttention())
    for row, n in enumerate(lengths):
        whole.step({row: n})
    cut = Sequences(spec, lengths, backend=NativeAttention())
    while any(d < n for d, n in zip(cut.done, lengths, strict=True)):
        open_rows = [r for r, n in enumerate(lengths) if cut.done[r] < n]
        chosen = data.draw(st.lists(st.sampled_from(open_rows), min_size=1, unique=True))
        cut.step({r: data.draw(st.integers(1, lengths[r] - cut.done[r])) for r in chosen})
    for a, b in zip(whole.out, cut.out, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("rotary_dim", [0, 16, 32])
@pytest.mark.parametrize("normed", [False, True])
def test_norm_rotation_and_write_match_the_reference(rotary_dim: int, normed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    spec = AttentionSpec(4, 2, 32, 0.2)
    tokens, padding, block_size = 21, 3, 16
    qkv = torch.randn(tokens + padding, 8 * 32, generator=generator)
    norm = HeadNorm(torch.randn(32, generator=generator), torch.randn(32, generator=generator), 1e-6, 1.0)
    angles = torch.rand(tokens + padding, 1, rotary_dim // 2, generator=generator) * 6
    turn = (torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)) if rotary_dim else None
    slots = torch.cat(
        [block_size + torch.randperm(3 * block_size, generator=generator)[:tokens], torch.zeros(padding)]
    )
    batch = make_batch([tokens], [tokens], torch.ones(1, 4, dtype=torch.int32), slots.long(), block_size)
    results = []
    for backend in (TorchAttention(), NativeAttention()):
        cache = torch.zeros(backend.cache_shape(4, block_size, 2, 32))
        q = backend.write(spec, qkv, norm if normed else None, turn, cache, backend.prepare(batch))
        # Heads first in one layout, blocks first in the other.
        results.append((q, cache if isinstance(backend, NativeAttention) else cache.transpose(1, 2)))
    torch.testing.assert_close(results[1][0][:tokens], results[0][0][:tokens], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(results[1][1], results[0][1], atol=1e-5, rtol=1e-5)
    assert not results[1][1][:, 0].any()  # padding is not written: the null block stays zero


def test_low_precision_is_left_to_others() -> None:
    assert NativeAttention.refuses(torch.float32) is None
    assert NativeAttention.refuses(torch.bfloat16) is not None
