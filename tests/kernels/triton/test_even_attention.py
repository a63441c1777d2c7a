"""Queries of all rows, their tiles shared evenly among programs, against dense attention in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.attention.base import AttentionSpec
from tests.kernels.device import DEVICE, HALF
from tests.kernels.triton.paged import BLOCK, SINKS, Paged, assert_close, make_paged, needs_triton, sinks_of

pytestmark = needs_triton
UNTOUCHED = 123.0


def run(spec: AttentionSpec, paged: Paged, programs: int, padding_row: int = -1) -> Tensor:
    from quire.kernels.triton.even_attention import even_attention, line_up_tiles

    out = torch.full((paged.query.shape[0], spec.num_heads * spec.head_dim), UNTOUCHED, device=DEVICE)
    out = out.to(paged.query.dtype)
    line = line_up_tiles(paged.contexts, paged.rows, paged.tables, BLOCK, padding_row)
    even_attention(paged.query, paged.cache, line, out, spec.scale, spec.soft_cap, programs, sinks=sinks_of(spec))
    return out


def halved(paged: Paged) -> Paged:
    return Paged(**{**vars(paged), "query": paged.query.to(HALF), "cache": paged.cache.to(HALF)})


@settings(max_examples=8, deadline=None)
@given(
    contexts=st.lists(st.integers(1, 600), min_size=1, max_size=5),
    programs=st.integers(1, 24),
    cap=st.sampled_from([None, 5.0]),
)
def test_any_lengths_and_any_number_of_programs(contexts: list[int], programs: int, cap: float | None) -> None:
    spec = AttentionSpec(4, 2, 32, 0.2, None, cap)
    paged = make_paged(spec, [1] * len(contexts), contexts)
    assert_close(run(spec, paged, programs), paged.expected)


@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads"),
    [(32, 17, 1), (64, 6, 2), (64, 1, 1), (80, 3, 3), (96, 2, 1), (128, 8, 2)],
)
def test_shapes_of_heads(head_dim: int, heads: int, kv_heads: int) -> None:
    spec = AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5)
    paged = make_paged(spec, [1, 1], [337, 3])
    assert_close(run(spec, halved(paged), programs=3), paged.expected, 3e-2)


def test_wide_heads_have_another_kernel() -> None:
    from quire.kernels.triton.even_attention import heads_fit

    assert heads_fit(128, 2)
    assert heads_fit(64, 4)
    assert not heads_fit(256, 2)
    assert not heads_fit(96, 4)


@pytest.mark.parametrize("programs", [1, 5])
def test_sinks(programs: int) -> None:
    """Once for each query, whether one program has all its keys or several share them."""
    spec = AttentionSpec(4, 2, 32, 0.2, sinks=SINKS)
    paged = make_paged(spec, [1] * 3, [1, 130, 65])
    assert_close(run(spec, paged, programs), paged.expected)


@pytest.mark.parametrize("programs", [1, 5])
def test_padding_is_not_read_and_gets_zeros(programs: int) -> None:
    spec = AttentionSpec(4, 2, 32, 0.2, sinks=SINKS)
    paged = make_paged(spec, [1] * 4, [270, 1, 200, 164])
    rows = paged.rows.clone()
    rows[1] = rows[3] = padding = 1000
    padded = Paged(**{**vars(paged), "rows": rows})
    expected = paged.expected.clone()
    expected[1] = expected[3] = 0.0
    assert_close(run(spec, padded, programs, padding), expected)
    nothing = Paged(**{**vars(paged), "rows": torch.full_like(rows, padding)})
    assert bool((run(spec, nothing, programs, padding) == 0.0).all())
