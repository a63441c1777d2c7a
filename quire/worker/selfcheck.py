"""At start: find the recipe of every matrix product, so that no result depends on the batch it ran in."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.embedding import TiedProjection
from quire.layers.linear import Linear
from quire.models.base import CausalLM
from quire.ops.invariance import MatmulRecipe, find_recipe, probe_row, row_ladder
from quire.ops.linear import linear, linear_transposed


@torch.inference_mode()
def make_invariant(model: CausalLM, max_tokens: int, max_samples: int) -> tuple[list[int], list[int]]:
    """Set every layer's recipe; returns the ladders of admitted token counts and of admitted logits rows."""
    head = model.lm_head.projection
    if all(layer.is_invariant for layer in model.modules() if isinstance(layer, Linear | TiedProjection)):
        return [], []
    found: dict[tuple[object, ...], MatmulRecipe] = {}
    for layer in (module for module in model.modules() if isinstance(module, Linear) and module is not head):
        key = (layer.weight.shape, layer.weight.dtype, layer.bias is None)
        if key not in found:
            found[key] = _find(layer, max_tokens)
        layer.recipe = found[key]
    head.recipe = _find(head, max_samples)
    min_tokens = max((recipe.min_rows for recipe in found.values()), default=1)
    return row_ladder(min_tokens, max_tokens), row_ladder(head.recipe.min_rows, max_samples)


def _find(layer: Linear | TiedProjection, max_rows: int) -> MatmulRecipe:
    def product(x: Tensor, k_chunk: int | None) -> Tensor:
        recipe = MatmulRecipe(min_rows=1, k_chunk=k_chunk)
        if isinstance(layer, TiedProjection):
            return linear_transposed(x, layer.embedding.weight, None, recipe)
        return linear(x, layer.weight, layer.bias, recipe)

    weight = layer.embedding.weight if isinstance(layer, TiedProjection) else layer.weight
    inner = weight.shape[1] if isinstance(layer, TiedProjection) else weight.shape[0]
    return find_recipe(product, probe_row(inner, weight.dtype), max_rows)
