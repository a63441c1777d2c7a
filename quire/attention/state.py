"""What a step tells recurrent layers: where the states of its rows lie. The arithmetic is that of ops/states.py."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionBatch, AttentionMetadata, GroupBackend
from quire.ops.states import StatePlaces


@dataclass(slots=True)
class StateMetadata(AttentionMetadata):
    batch: AttentionBatch
    places: StatePlaces


class StateBackend(GroupBackend):
    """Of KV groups of states, beside the backend of attention, which has kernels for what is no arithmetic."""

    def __init__(self, attention: AttentionBackend) -> None:
        self._attention = attention

    def note_finite(self, values: Tensor, out: Tensor) -> None:
        self._attention.note_finite(values, out)

    def prepare(self, batch: AttentionBatch, kind: Hashable, lists: tuple[Tensor, ...]) -> StateMetadata:
        places = StatePlaces(batch.tables, batch.rows, batch.contexts, batch.query_starts, batch.block_size)
        return StateMetadata(batch, places)
