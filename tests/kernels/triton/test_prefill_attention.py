"""Tiles of queries over the paged cache, with and without a cached prefix, against dense attention in float64."""

from __future__ import annotations

from functools import partial

import pytest
from torch import Tensor

from quire.attention.base import AttentionSpec
from tests.kernels.device import HALF
from tests.kernels.triton.paged import (
    SINKS,
    UNTOUCHED,
    Paged,
    assert_close,
    attend,
    make_paged,
    needs_triton,
    seeing,
    tiles_of,
)

pytestmark = needs_triton


def run(
    spec: AttentionSpec, paged: Paged, tiles: list[tuple[int, int]], query_tile: int = 16, keys: int = 32
) -> Tensor:
    from quire.kernels.triton.prefill_attention import prefill_attention

    return attend(partial(prefill_attention, query_tile=query_tile, keys=keys), spec, paged, tiles)


@pytest.mark.parametrize(("window", "cap"), [(None, None), (20, None), (1, 3.0), (None, 5.0), (-20, None)])
def test_rows_with_and_without_a_cached_prefix(window: int | None, cap: float | None) -> None:
    """Blocks before the window belong to others by then: they are NaN here and must not be read."""
    spec = seeing(AttentionSpec(4, 2, 32, 0.2, soft_cap=cap), window)
    queries, contexts = [5, 30, 1, 33], [5, 70, 33, 113]
    paged = make_paged(spec, queries, contexts)
    assert_close(run(spec, paged, tiles_of(queries)), paged.expected)


@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads"), [(32, 6, 2), (64, 1, 1), (80, 3, 3), (96, 2, 1), (128, 4, 2), (256, 3, 1)]
)
def test_shapes_of_heads(head_dim: int, heads: int, kv_heads: int) -> None:
    spec = AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5)
    paged = make_paged(spec, [18], [27])
    assert_close(run(spec, paged, tiles_of([18]), keys=16), paged.expected)


def test_padding_and_tokens_of_no_tile() -> None:
    spec = AttentionSpec(2, 1, 32, 0.2)
    paged = make_paged(spec, [20, 3, 17], [20, 40, 17])
    tiles = [(0, 0), (-1, -1), (2, 0), (0, 16), (2, 16), (-1, -1)]
    out = run(spec, paged, tiles)
    computed = [*range(20), *range(23, 40)]
    assert_close(out[computed], paged.expected[computed])
    assert bool((out[20:23] == UNTOUCHED).all())


@pytest.mark.parametrize("head_dim", [32, 256])
def test_the_tiles_that_are_used(head_dim: int) -> None:
    """Of the widest heads, too, a multiprocessor must have room for the tiles."""
    from quire.kernels.triton.prefill_attention import QUERY_TILE

    spec = AttentionSpec(1, 1, head_dim, 0.2)
    paged = make_paged(spec, [QUERY_TILE + 3], [QUERY_TILE + 40])
    tiles = tiles_of([QUERY_TILE + 3], QUERY_TILE)
    assert_close(run(spec, paged, tiles, QUERY_TILE, 128), paged.expected)
    half = Paged(**{**vars(paged), "query": paged.query.to(HALF), "cache": paged.cache.to(HALF)})
    assert_close(run(spec, half, tiles, QUERY_TILE, 128), paged.expected, 3e-2)


def test_half_precision() -> None:
    spec = AttentionSpec(4, 2, 64, 0.125)
    paged = make_paged(spec, [20], [50])
    half = Paged(**{**vars(paged), "query": paged.query.to(HALF), "cache": paged.cache.to(HALF)})
    assert_close(run(spec, half, tiles_of([20])), paged.expected, 3e-2)


@pytest.mark.parametrize(("splits", "heads", "window"), [(0, 1, 20), (2, 1, None), (3, 2, 20)])
def test_sinks(splits: int, heads: int, window: int | None) -> None:
    from quire.kernels.triton.prefill_attention import Split, prefill_attention

    spec = AttentionSpec(4, 2, 32, 0.2, window, sinks=SINKS)
    queries, contexts = [1, 18], [1, 40]
    paged = make_paged(spec, queries, contexts)
    split = Split(splits, heads, keys=16) if splits else None
    kernel = partial(prefill_attention, query_tile=16, keys=32, split=split)
    assert_close(attend(kernel, spec, paged, tiles_of(queries)), paged.expected)


@pytest.mark.parametrize(("window", "cap"), [(None, None), (20, None), (None, 5.0)])
@pytest.mark.parametrize(("splits", "heads"), [(2, 1), (3, 2), (8, 2)])
def test_programs_that_share_the_keys_of_a_tile(
    splits: int, heads: int, window: int | None, cap: float | None
) -> None:
    """Some of the programs have no key at all; tokens of no tile keep what they have."""
    from quire.kernels.triton.prefill_attention import Split, prefill_attention

    spec = AttentionSpec(4, 2, 32, 0.2, window, cap)
    queries, contexts = [5, 30, 3, 33], [5, 70, 33, 113]
    paged = make_paged(spec, queries, contexts)
    kernel = partial(prefill_attention, query_tile=16, split=Split(splits, heads, keys=16))
    tiles = [(-1, -1), *(tile for tile in tiles_of(queries) if tile[0] != 2)]
    out = attend(kernel, spec, paged, tiles)
    computed = [*range(35), *range(38, 71)]
    assert_close(out[computed], paged.expected[computed])
    assert bool((out[35:38] == UNTOUCHED).all())
