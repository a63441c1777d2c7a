"""At start: find the recipe of every matmul, so that no result depends on the batch it ran in."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.quant.base import TableMethod
from quire.layers.quant.plain import PlainLinear
from quire.models.base import CausalLM, Model
from quire.ops.invariance import MatmulRecipe, find_recipe, probe_row, row_ladder


@torch.inference_mode()
def make_invariant(model: Model, max_tokens: int, max_samples: int) -> tuple[list[int], list[int]]:
    """Set the recipe of every matmul that needs one; returns the ladders of admitted tokens and of logits rows."""
    lm_head = model.lm_head if isinstance(model, CausalLM) else None
    head = None if lm_head is None else lm_head.projection.method
    wanting = [m for m in model.modules() if isinstance(m, PlainLinear) and not m.is_invariant]
    found: dict[tuple[object, ...], MatmulRecipe] = {}
    token_ladder: list[int] = []
    sample_ladder: list[int] = []
    for method in wanting:
        if method is head:
            method.recipe = find_recipe(method.probe, _probe(method), max_samples)
            sample_ladder = row_ladder(method.recipe.min_rows, max_samples)
        elif not isinstance(method, TableMethod):  # an untied table only looks up rows
            key = (method.weight.shape, method.weight.dtype, method.bias is None)
            if key not in found:
                found[key] = find_recipe(method.probe, _probe(method), max_tokens)
            method.recipe = found[key]
    if found:
        token_ladder = row_ladder(max(recipe.min_rows for recipe in found.values()), max_tokens)
    return token_ladder, sample_ladder


def _probe(method: PlainLinear) -> Tensor:
    return probe_row(method.spec.in_features, method.weight.dtype)


def coarse_ladder(max_rows: int) -> list[int]:
    """Few sizes to pad to; large ones are multiples of 512, as budgets tend to be."""
    sizes = [1, 2, 4, 8, 16, 32, 48, 64]
    while sizes[-1] < max_rows:
        sizes.append(sizes[-1] + (32 if sizes[-1] < 256 else 128 if sizes[-1] < 1024 else 512))
    return sizes
