"""Keeps a request whose numbers broke from spoiling others: it fails alone, and its KV blocks are made finite again.

Attention multiplies what a query must not see by zero, and zero times NaN is NaN. So a block that holds one would
break whoever is given it next.
"""

from __future__ import annotations

import torch

from quire.layers.attention import CachedLayer
from quire.runner.request_rows import BlockTables

MESSAGE = "the model produced NaN or infinite values; the weights or the dtype are unsuitable"


class Containment:
    def __init__(self, layers: list[CachedLayer], tables: BlockTables) -> None:
        # Groups of a pool share cache tensors, so each tensor is healed once, at the blocks of all that use it.
        users: dict[int, tuple[CachedLayer, list[int]]] = {}
        for layer in layers:
            users.setdefault(id(layer.cache), (layer, []))[1].append(layer.group)
        self._users = list(users.values())
        self._tables = tables

    def heal(self, row: int, num_computed_tokens: int) -> None:
        """Replace what is not finite in the blocks of a row by zeros; blocks shared with others are finite."""
        num_blocks = -(-num_computed_tokens // self._tables.block_size)
        for layer, groups in self._users:
            layer.heal(torch.unique(self._tables.tables[groups, row, :num_blocks]).long())
