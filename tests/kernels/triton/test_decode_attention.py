"""Queries one by one, their keys split over programs, against dense attention in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.attention.base import AttentionSpec
from tests.kernels.device import DEVICE, HALF
from tests.kernels.triton.paged import SINKS, Paged, assert_close, int32, make_paged, needs_triton, seeing, sinks_of

pytestmark = needs_triton
UNTOUCHED = 123.0


def run(
    spec: AttentionSpec, paged: Paged, index: list[int], tokens: list[int], splits: int, keys: int = 32
) -> Tensor:
    from quire.kernels.triton.decode_attention import decode_attention

    out = torch.full((paged.query.shape[0], spec.num_heads * spec.head_dim), UNTOUCHED, device=DEVICE)
    out = out.to(paged.query.dtype)
    decode_attention(
        paged.query,
        paged.cache,
        paged.tables,
        int32(index),
        int32(tokens),
        paged.rows,
        paged.contexts,
        paged.query_starts,
        out,
        spec.scale,
        spec.soft_cap,
        spec.kernel_window,
        splits=splits,
        keys=keys,
        sinks=sinks_of(spec),
    )
    return out


@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize(
    ("window", "cap"), [(None, None), (20, None), (1, None), (None, 5.0), (33, 2.0), (-20, None)]
)
def test_single_queries(splits: int, window: int | None, cap: float | None) -> None:
    """With 8 splits most have nothing to do, and with a window some tiles are wholly outside it."""
    spec = seeing(AttentionSpec(4, 2, 32, 0.2, soft_cap=cap), window)
    contexts = [1, 15, 16, 17, 70, 131]
    paged = make_paged(spec, [1] * len(contexts), contexts)
    every = list(range(len(contexts)))
    assert_close(run(spec, paged, every, every, splits), paged.expected)


@pytest.mark.parametrize(("splits", "window"), [(1, None), (4, None), (4, 20)])
def test_sinks(splits: int, window: int | None) -> None:
    spec = AttentionSpec(4, 2, 32, 0.2, window, sinks=SINKS)
    paged = make_paged(spec, [1, 1], [1, 70])
    assert_close(run(spec, paged, [0, 1], [0, 1], splits), paged.expected)


@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads"),
    [(32, 17, 1), (64, 6, 2), (64, 1, 1), (80, 3, 3), (96, 2, 1), (128, 8, 2), (256, 5, 1)],
)
def test_shapes_of_heads(head_dim: int, heads: int, kv_heads: int) -> None:
    spec = AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5)
    paged = make_paged(spec, [1, 1], [37, 3])
    assert_close(run(spec, paged, [0, 1], [0, 1], splits=2, keys=16), paged.expected)


@pytest.mark.parametrize("splits", [1, 4])
def test_several_queries_of_a_row_and_padding(splits: int) -> None:
    """A query sees the keys up to its own; entries of -1 are skipped; tokens that are not listed are left alone."""
    spec = AttentionSpec(4, 2, 32, 0.2)
    paged = make_paged(spec, [3, 5, 2], [3, 40, 19])
    index, tokens = [0, -1, 0, 2, 2, -1], [0, -1, 2, 8, 9, -1]
    out = run(spec, paged, index, tokens, splits)
    listed = torch.tensor([0, 2, 8, 9])
    assert_close(out[listed.to(DEVICE)], paged.expected[listed])
    others = [token for token in range(10) if token not in listed.tolist()]
    assert bool((out[others] == UNTOUCHED).all())


def test_half_precision() -> None:
    spec = AttentionSpec(4, 2, 64, 0.125)
    paged = make_paged(spec, [1, 1], [50, 7])
    half = Paged(**{**vars(paged), "query": paged.query.to(HALF), "cache": paged.cache.to(HALF)})
    assert_close(run(spec, half, [0, 1], [0, 1], splits=2), paged.expected, 3e-2)
