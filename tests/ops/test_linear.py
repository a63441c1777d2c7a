"""Matmuls by recipe: the same numbers as a plain matmul, whatever chunks and tiles the recipe asks for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.ops.invariance import MatmulRecipe, find_recipe, probe_row, row_ladder
from quire.ops.linear import DIRECT, linear, linear_transposed

RECIPES = [
    DIRECT,
    MatmulRecipe(4, k_chunk=64),
    MatmulRecipe(4, k_chunk=50),  # does not divide the inner dimension
    MatmulRecipe(4, k_chunk=500),  # longer than it
    MatmulRecipe(8, row_tile=8),
    MatmulRecipe(8, k_chunk=64, row_tile=8),
]


def make(rows: int, inner: int = 130, outer: int = 37, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (torch.randn(*s, generator=generator) for s in ((rows, inner), (inner, outer), (outer,)))
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 24, 30])
@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_same_as_a_plain_matmul(recipe: MatmulRecipe, rows: int) -> None:
    x, weight, bias = make(rows)
    expected = x.double() @ weight.double()
    torch.testing.assert_close(linear(x, weight, None, recipe), expected.float())
    torch.testing.assert_close(linear(x, weight, bias, recipe), (expected + bias.double()).float())
    transposed = linear_transposed(x, weight.t().contiguous(), None, recipe)
    torch.testing.assert_close(transposed, expected.float())
    with_bias = linear_transposed(x, weight.t().contiguous(), bias, recipe)
    torch.testing.assert_close(with_bias, (expected + bias.double()).float())
    assert transposed.is_contiguous(), "the sampler writes into it"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_inputs_are_left_alone(with_bias: bool, dtype: torch.dtype) -> None:
    x, weight, bias = make(9, dtype=dtype)
    before = x.clone(), weight.clone(), bias.clone()
    for recipe in RECIPES:
        out = linear(x, weight, bias if with_bias else None, recipe)
        assert out.dtype == dtype
        out.add_(1)
    assert all(torch.equal(a, b) for a, b in zip(before, (x, weight, bias), strict=True))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tile", [8, 32])
def test_tiles_give_a_row_the_same_bits_in_any_batch(tile: int, transposed: bool) -> None:
    """The way out where no padding is enough: every call has exactly `tile` rows."""
    x, weight, bias = make(70, inner=576, outer=96)
    recipe = MatmulRecipe(tile, row_tile=tile)

    def run(rows: Tensor) -> Tensor:
        return (
            linear_transposed(rows, weight.t().contiguous(), bias, recipe)
            if transposed
            else linear(rows, weight, bias, recipe)
        )

    whole = run(x)
    for start, stop in [(0, 1), (3, 5), (10, 43), (69, 70), (0, 64)]:
        assert torch.equal(run(x[start:stop]), whole[start:stop])
    assert torch.equal(run(x.flip(0)), whole.flip(0))


@pytest.mark.parametrize(("inner", "outer"), [(64, 96), (576, 1536), (1536, 576)])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_found_recipe_keeps_its_promise_for_other_values(inner: int, outer: int, transposed: bool) -> None:
    x, weight, _ = make(128, inner, outer)
    table = weight.t().contiguous()

    def matmul(rows: Tensor, recipe: MatmulRecipe) -> Tensor:
        return linear_transposed(rows, table, None, recipe) if transposed else linear(rows, weight, None, recipe)

    probe = probe_row(inner, torch.float32)
    recipe = find_recipe(lambda rows, chunk: matmul(rows, MatmulRecipe(1, chunk)), probe, 128)
    whole = matmul(x, recipe)
    for size in row_ladder(recipe.min_rows, 128):
        for start in (0, (128 - size) // 2, 128 - size):
            part = matmul(x[start : start + size].contiguous(), recipe)[: 128 - start]
            assert torch.equal(part, whole[start : start + size]), (recipe, size, start)
