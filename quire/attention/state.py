"""What a step tells recurrent layers: where the states of its rows lie. The arithmetic is that of ops/states.py."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from quire.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionMetadata,
    GroupBackend,
    HostLengths,
    WorkPlan,
)
from quire.ops.states import StatePlaces
from quire.types.cache import STATE_SHORT


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

    def divide(self, lengths: HostLengths) -> WorkPlan:
        """A kind is whether some row has more tokens than are folded one by one."""
        return WorkPlan(max(lengths.queries, default=0) > STATE_SHORT)

    def decode_kind(self, contexts: list[int] | None, num_rows: int) -> bool:
        return False

    def usual_kinds(self, num_tokens: int, max_context: int, is_full: bool) -> tuple[bool, ...]:
        return (False, True) if num_tokens > STATE_SHORT else (False,)

    def prepare(self, batch: AttentionBatch, kind: Hashable, lists: tuple[Tensor, ...]) -> StateMetadata:
        rows = (batch.tables, batch.rows, batch.contexts, batch.query_starts)
        places = StatePlaces(*rows, batch.block_size, has_long=bool(kind))
        return StateMetadata(batch, places)
