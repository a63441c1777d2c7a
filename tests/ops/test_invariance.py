"""The self-check finds the cheapest way of calling a matmul under which a row's bits never depend on its batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quire.ops.invariance import MIN_CHUNK, MIN_ROWS, MatmulRecipe, all_rows_equal, find_recipe, probe_row, row_ladder

ROW = probe_row(1024, torch.float32)


@given(st.sampled_from(MIN_ROWS), st.integers(1, 3000))
def test_the_ladder_reaches_from_the_fewest_rows_to_the_most(min_rows: int, max_rows: int) -> None:
    ladder = row_ladder(min_rows, max_rows)
    assert ladder == sorted(set(ladder))
    assert ladder[0] == min_rows
    assert ladder[-1] >= max_rows
    assert len(ladder) < 2 or ladder[-2] < max_rows, "nothing above what is needed"
    assert all(high - low <= max(8, low // 2) for low, high in pairwise(ladder)), "little padding"


Matmul = Callable[[Tensor, int | None], Tensor]


def matmul_that(wrong: Callable[[int, int | None], bool]) -> Matmul:
    """x -> its sum, off by one in the last row of calls for which wrong(num_rows, k_chunk)."""

    def matmul(x: Tensor, k_chunk: int | None) -> Tensor:
        out = x.sum(-1, keepdim=True).expand(-1, 3).clone()
        if wrong(x.shape[0], k_chunk):
            out[-1, 1] += 1
        return out

    return matmul


@pytest.mark.parametrize(
    ("wrong", "recipe"),
    [
        (lambda rows, chunk: False, MatmulRecipe(4)),
        (lambda rows, chunk: rows < 8, MatmulRecipe(8)),
        (lambda rows, chunk: rows < 32, MatmulRecipe(32)),
        (lambda rows, chunk: chunk is None, MatmulRecipe(4, k_chunk=512)),
        (lambda rows, chunk: chunk is None or chunk > 128 or rows < 16, MatmulRecipe(16, k_chunk=128)),
        (lambda rows, chunk: rows == 96, MatmulRecipe(32, row_tile=32)),
        (lambda rows, chunk: True, MatmulRecipe(32, row_tile=32)),
    ],
)
def test_the_cheapest_recipe_that_is_invariant(
    wrong: Callable[[int, int | None], bool], recipe: MatmulRecipe
) -> None:
    assert find_recipe(matmul_that(wrong), ROW, max_rows=100) == recipe


def test_no_chunk_is_shorter_than_is_useful() -> None:
    tried: set[int | None] = set()

    def matmul(x: Tensor, k_chunk: int | None) -> Tensor:
        tried.add(k_chunk)
        return torch.arange(x.shape[0])[:, None].float()

    find_recipe(matmul, ROW, max_rows=8)
    assert min(chunk for chunk in tried if chunk is not None) == MIN_CHUNK


def test_every_row_of_every_size_is_looked_at() -> None:
    ladder = row_ladder(4, 64)
    for size in ladder:
        for row in (0, 1, size - 1):

            def run(x: Tensor, size: int = size, row: int = row) -> Tensor:
                out = x.clone()
                if x.shape[0] == size:
                    out[row, 5] += 1
                return out

            assert not all_rows_equal(run, ROW, ladder), (size, row)
    assert all_rows_equal(lambda x: x, ROW, ladder)


def test_broken_columns_do_not_hide_what_is_true_of_the_others() -> None:
    def broken(x: Tensor) -> Tensor:
        return torch.cat((x[:, :8], x[:, :2] * torch.nan, x[:, :1] * torch.inf), dim=1)

    assert all_rows_equal(broken, ROW, [4, 8])
    assert not all_rows_equal(lambda x: broken(x) + (x.shape[0] == 8), ROW, [4, 8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probe_rows_are_reproducible_and_of_the_dtype(dtype: torch.dtype) -> None:
    assert probe_row(8, dtype).dtype == dtype
    assert torch.equal(probe_row(8, dtype), probe_row(8, dtype))
    assert not torch.equal(probe_row(8, dtype), probe_row(8, dtype, seed=1))
