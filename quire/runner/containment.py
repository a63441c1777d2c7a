"""Keeps a request whose numbers broke from spoiling others: it fails alone, and its KV blocks are made finite again.

Attention multiplies what a query must not see by zero, and zero times NaN is NaN. So a block that holds one would
break whoever is given it next.
"""

from __future__ import annotations

import torch

from quire.layers.attention import Attention
from quire.runner.block_tables import BlockTables

MESSAGE = "the model produced NaN or infinite values; the weights or the dtype are unsuitable"


class Containment:
    def __init__(self, layers: list[Attention], tables: BlockTables) -> None:
        # Groups share cache tensors, so each tensor is healed once, at the blocks of all groups.
        self._layers = list({id(layer.cache): layer for layer in layers}.values())
        self._tables = tables

    def heal(self, row: int, num_computed_tokens: int) -> None:
        """Replace what is not finite in the blocks of a row by zeros; blocks shared with others are finite."""
        num_blocks = -(-num_computed_tokens // self._tables.block_size)
        blocks = torch.unique(self._tables.tables[:, row, :num_blocks]).long()
        for layer in self._layers:
            layer.backend.heal(layer.cache, blocks)
