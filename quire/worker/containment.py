"""Keeps a request whose numbers broke from spoiling others: it fails alone, and its KV blocks are made finite again.

Attention multiplies what a query must not see by zero, and zero times NaN is NaN. So a block that holds one would
break whoever is given it next.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.attention import Attention
from quire.platform.transfer import Download
from quire.types.step import StepPlan
from quire.worker.block_tables import BlockTables
from quire.worker.input_batch import InputBatch

MESSAGE = "the model produced NaN or infinite values; the weights or the dtype are unsuitable"


class BrokenRows:
    def __init__(self, finite: Download | None = None, num_tokens: list[int] | None = None) -> None:
        """Of rows with so many tokens each, whether each token is finite; without, none is broken."""
        self._finite = finite
        self._num_tokens = num_tokens or []

    def indices(self) -> list[int]:
        """Indices into the plan's rows. Waits for the step."""
        if self._finite is None:
            return []
        finite = self._finite.get()
        if bool(finite.all()):
            return []
        return [index for index, part in enumerate(finite.split(self._num_tokens)) if not bool(part.all())]


class Containment:
    def __init__(self, layers: list[Attention], tables: BlockTables) -> None:
        # Groups share cache tensors, so each tensor is healed once, at the blocks of all groups.
        self._layers = list({id(layer.cache): layer for layer in layers}.values())
        self._tables = tables

    def find(self, plan: StepPlan, batch: InputBatch, hidden: Tensor) -> BrokenRows:
        """Which rows have a token that is not finite. Does not sync.

        Where each row has one token and samples, the sampler finds it out from the logits; so it does for what
        breaks after the last layer's keys and values.
        """
        total = sum(plan.num_tokens)
        if total == len(batch.sample_indices):
            return BrokenRows()
        wanted = batch.forward.wanted
        finite = hidden[:total].isfinite().all(-1) if wanted is None else wanted.finite[:total]
        return BrokenRows(Download(finite), plan.num_tokens)

    def heal(self, row: int, num_computed_tokens: int) -> None:
        """Replace what is not finite in the blocks of a row by zeros; blocks shared with others are finite."""
        num_blocks = -(-num_computed_tokens // self._tables.block_size)
        blocks = torch.unique(self._tables.tables[:, row, :num_blocks]).long()
        for layer in self._layers:
            layer.backend.heal(layer.cache, blocks)
