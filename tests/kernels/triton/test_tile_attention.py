"""Tiles of queries with keys in segments, against dense attention in float64, and against each other by bits."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.attention.base import AttentionSpec
from tests.kernels.device import HALF
from tests.kernels.triton.paged import (
    SINKS,
    UNTOUCHED,
    Paged,
    assert_close,
    attend,
    int32,
    make_paged,
    needs_triton,
    seeing,
    tiles_of,
)

pytestmark = needs_triton


def run(spec: AttentionSpec, paged: Paged, tiles: list[tuple[int, int]], **options: int) -> Tensor:
    from quire.kernels.triton.tile_attention import Cut, tile_attention

    return attend(partial(tile_attention, cut=Cut(**options)), spec, paged, tiles)


@pytest.mark.parametrize(("window", "cap"), [(None, None), (20, None), (1, 3.0), (None, 5.0), (-20, None)])
@pytest.mark.parametrize(
    "options",
    [{"splits": 4}, {"splits": 0, "segment": 32}, {"splits": 4, "long": 40}],
    ids=["split", "fold", "half of the splits for short rows"],
)
def test_rows_with_and_without_a_cached_prefix(
    window: int | None, cap: float | None, options: dict[str, int]
) -> None:
    """Blocks before the window belong to others by then: they are NaN here and must not be read."""
    spec = seeing(AttentionSpec(2, 1, 32, 0.2, soft_cap=cap), window)
    queries, contexts = [5, 18, 1], [5, 70, 33]
    paged = make_paged(spec, queries, contexts)
    out = run(spec, paged, tiles_of(queries), tile=16, lines=16, keys=16, **options)
    assert_close(out, paged.expected)


@pytest.mark.parametrize(("window", "options"), [(None, {"splits": 2}), (20, {"splits": 0, "segment": 32})])
def test_sinks(window: int | None, options: dict[str, int]) -> None:
    spec = AttentionSpec(4, 2, 16, 0.2, window, sinks=SINKS)
    queries, contexts = [3, 1], [40, 1]
    paged = make_paged(spec, queries, contexts)
    out = run(spec, paged, tiles_of(queries), tile=16, lines=16, keys=16, **options)
    assert_close(out, paged.expected)


@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads"), [(32, 6, 2), (64, 1, 1), (80, 3, 3), (96, 7, 1), (128, 4, 2), (256, 3, 1)]
)
def test_shapes_of_heads(head_dim: int, heads: int, kv_heads: int) -> None:
    spec = AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5)
    paged = make_paged(spec, [3], [37])
    assert_close(run(spec, paged, tiles_of([3]), tile=16, splits=2, lines=16, keys=16), paged.expected)


def test_padding_and_tokens_of_no_tile() -> None:
    spec = AttentionSpec(2, 1, 32, 0.2)
    paged = make_paged(spec, [20, 3, 17], [20, 40, 17])
    tiles = [(0, 0), (-1, -1), (2, 0), (0, 16), (2, 16), (-1, -1)]
    for options in ({"splits": 2}, {"splits": 0, "segment": 32}):
        out = run(spec, paged, tiles, tile=16, lines=16, keys=16, **options)
        computed = [*range(20), *range(23, 40)]
        assert_close(out[computed], paged.expected[computed])
        assert bool((out[20:23] == UNTOUCHED).all())


def test_memory_for_listed_queries_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may have thousands of tokens beside a few whose keys are shared."""
    spec, taken, empty = AttentionSpec(2, 1, 32, 0.2), [], torch.empty
    paged = make_paged(spec, [40, 3], [40, 43])

    def spy(*shape: int, **options: Any) -> Tensor:
        taken.append(math.prod(shape))
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", spy)
    out = run(spec, paged, [(1, 0)], tile=16, splits=4, lines=16, keys=16)
    assert_close(out[40:], paged.expected[40:])
    assert sum(taken) == 16 * 2 * 4 * (32 + 2)


@pytest.mark.parametrize(("window", "sinks"), [(None, None), (40, None), (40, SINKS[:2]), (-40, None)])
def test_fixed_segments_give_the_same_bits_however_the_work_is_cut(window: int | None, sinks: Tensor | None) -> None:
    """All queries at once by folding programs, and the last ones alone by splits of several sizes."""
    spec = seeing(AttentionSpec(2, 1, 64, 0.125, sinks=sinks), window)
    paged = make_paged(spec, [90], [90])
    shape = {"segment": 32, "keys": 16}
    whole = run(spec, paged, tiles_of([90], 32), tile=32, splits=0, lines=64, num_warps=4, **shape)
    for count in (1, 16):
        part = Paged(
            query=paged.query[-count:],
            cache=paged.cache,
            tables=paged.tables,
            rows=paged.rows,
            contexts=paged.contexts,
            query_starts=int32([0, count]),
            expected=paged.expected[-count:],
        )
        for splits in (1, 3):
            out = run(spec, part, [(0, 0)], tile=16, splits=splits, num_segments=4, lines=64, **shape)
            assert torch.equal(out, whole[-count:])


def test_half_precision() -> None:
    spec = AttentionSpec(4, 2, 64, 0.125)
    paged = make_paged(spec, [20], [50])
    half = Paged(**{**vars(paged), "query": paged.query.to(HALF), "cache": paged.cache.to(HALF)})
    assert_close(run(spec, half, tiles_of([20]), tile=16, splits=2), paged.expected, 3e-2)
