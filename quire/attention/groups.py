"""The attention backends of a step, one for each KV group; groups may share one, and then share its work plan."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate, pairwise, product

from torch import Tensor

from quire.attention.base import AttentionBatch, AttentionMetadata, GroupBackend, HostLengths, WorkPlan


class GroupBackends:
    """Asks every backend there is. Of several, a kind is the tuple of theirs, and their lists follow each other."""

    def __init__(self, of_group: Sequence[GroupBackend]) -> None:
        self._distinct = list(dict.fromkeys(of_group))
        self._of_group = [(backend, self._distinct.index(backend)) for backend in of_group]
        counts = (len(backend.list_lengths(1, 1)) for backend in self._distinct)
        self._lists = [slice(*ends) for ends in pairwise(accumulate(counts, initial=0))]

    def divide(self, lengths: HostLengths) -> WorkPlan:
        works = [backend.divide(lengths) for backend in self._distinct]
        if len(works) == 1:
            return works[0]
        return WorkPlan(tuple(work.kind for work in works), tuple(rows for work in works for rows in work.lists))

    def decode_kind(self, contexts: list[int] | None, num_rows: int) -> Hashable:
        return self._joined([backend.decode_kind(contexts, num_rows) for backend in self._distinct])

    def list_lengths(self, num_tokens: int, max_rows: int) -> tuple[int, ...]:
        return tuple(n for backend in self._distinct for n in backend.list_lengths(num_tokens, max_rows))

    def usual_kinds(self, num_tokens: int, max_context: int, is_full: bool) -> Sequence[Hashable]:
        usual = [backend.usual_kinds(num_tokens, max_context, is_full) for backend in self._distinct]
        return [self._joined(kinds) for kinds in product(*usual)]

    def captures(self, work: WorkPlan, num_tokens: int) -> bool:
        return all(
            backend.captures(WorkPlan(self._kind_of(index, work.kind), work.lists[self._lists[index]]), num_tokens)
            for index, backend in enumerate(self._distinct)
        )

    def prepare(
        self, group: int, batch: AttentionBatch, kind: Hashable, lists: tuple[Tensor, ...]
    ) -> AttentionMetadata:
        backend, index = self._of_group[group]
        return backend.prepare(batch, self._kind_of(index, kind), lists[self._lists[index]] if lists else ())

    def note_finite(self, values: Tensor, out: Tensor) -> None:
        self._distinct[0].note_finite(values, out)

    def _joined(self, kinds: Sequence[Hashable]) -> Hashable:
        return kinds[0] if len(self._distinct) == 1 else tuple(kinds)

    def _kind_of(self, index: int, kind: Hashable) -> Hashable:
        return kind[index] if len(self._distinct) > 1 and isinstance(kind, tuple) else kind
