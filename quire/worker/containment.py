"""Keeps a request whose numbers broke from spoiling others: it fails alone, and its KV blocks are made finite again.

Attention multiplies what a query must not see by zero, and zero times NaN is NaN. So a block that holds one would
break whoever is given it next.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.attention import Attention
from quire.types.step import StepPlan
from quire.worker.block_tables import BlockTables
from quire.worker.input_batch import InputBatch

MESSAGE = "the model produced NaN or infinite values; the weights or the dtype are unsuitable"


class Containment:
    def __init__(self, layers: list[Attention], tables: BlockTables) -> None:
        # Groups share cache tensors, so each tensor is healed once, at the blocks of all groups.
        self._layers = list({id(layer.cache): layer for layer in layers}.values())
        self._tables = tables

    def broken_rows(self, plan: StepPlan, batch: InputBatch, hidden: Tensor) -> list[int]:
        """Indices into the plan's rows of those with a token that is not finite. Syncs, in steps with a prompt.

        Where each row has one token and samples, the sampler finds it out from the logits.
        """
        total = sum(plan.num_tokens)
        if total == len(batch.sample_indices):
            return []
        finite = hidden[:total].isfinite().all(-1)
        if bool(finite.all()):
            return []
        parts = torch.split(finite.cpu(), plan.num_tokens)
        return [index for index, part in enumerate(parts) if not bool(part.all())]

    def heal(self, row: int, num_computed_tokens: int) -> None:
        """Replace what is not finite in the blocks of a row by zeros; blocks shared with others are finite."""
        num_blocks = -(-num_computed_tokens // self._tables.block_size)
        blocks = torch.unique(self._tables.tables[:, row, :num_blocks]).long()
        for layer in self._layers:
            layer.backend.heal(layer.cache, blocks)
