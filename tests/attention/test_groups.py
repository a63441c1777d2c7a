from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from quire.attention.base import AttentionBatch, HostLengths, WorkPlan, make_batch
from quire.attention.groups import GroupBackends
from quire.attention.torch_ref import TorchAttention


class Noting(TorchAttention):
    """Divides rows by a rule of its own, and hands on what it is given."""

    def __init__(self, name: str, num_lists: int) -> None:
        super().__init__()
        self.name, self.num_lists = name, num_lists

    def divide(self, lengths: HostLengths) -> WorkPlan:
        return WorkPlan((self.name, max(lengths.queries)), tuple([n] for n in range(self.num_lists)))

    def decode_kind(self, contexts: list[int] | None, num_rows: int) -> Hashable:
        return self.name, num_rows

    def list_lengths(self, num_tokens: int, max_rows: int) -> tuple[int, ...]:
        return (num_tokens,) * self.num_lists

    def usual_kinds(self, num_tokens: int, max_context: int, is_full: bool) -> Sequence[Hashable]:
        return [(self.name, n) for n in (1, 2)]

    def captures(self, work: WorkPlan, num_tokens: int) -> bool:
        return work.kind == (self.name, 3) and len(work.lists) == self.num_lists

    def prepare(self, batch: AttentionBatch, kind: Hashable, lists: tuple[Tensor, ...]) -> Any:
        return self.name, kind, [int(values) for values in lists]


BATCH = make_batch([3], [3], torch.ones(1, 1, dtype=torch.int32), torch.arange(16, 19), 16)
LENGTHS = HostLengths([3], [3])


def test_groups_with_one_backend_share_its_work() -> None:
    one = Noting("a", 2)
    backends = GroupBackends([one, one])
    work = backends.divide(LENGTHS)
    assert work == one.divide(LENGTHS)
    assert backends.decode_kind(None, 5) == ("a", 5)
    assert list(backends.usual_kinds(8, 64, False)) == [("a", 1), ("a", 2)]
    assert backends.list_lengths(8, 4) == (8, 8)
    assert backends.captures(work, 8)
    lists = tuple(torch.tensor(values) for values in work.lists)
    for group in (0, 1):
        assert backends.prepare(group, BATCH, work.kind, lists) == ("a", ("a", 3), [0, 1])


def test_each_group_gets_the_work_of_its_own_backend() -> None:
    a, b = Noting("a", 2), Noting("b", 1)
    backends = GroupBackends([a, b, a])
    work = backends.divide(LENGTHS)
    lists = tuple(torch.tensor(values) for values in work.lists)
    assert [backends.prepare(group, BATCH, work.kind, lists) for group in range(3)] == [
        ("a", ("a", 3), [0, 1]),
        ("b", ("b", 3), [0]),
        ("a", ("a", 3), [0, 1]),
    ]
    assert backends.captures(work, 8)
    assert not backends.captures(work._replace(kind=(("a", 3), ("b", 4))), 8)
    assert backends.list_lengths(8, 4) == (8, 8, 8)
    assert len(backends.usual_kinds(8, 64, False)) == 4
    decode = backends.decode_kind(None, 5)
    assert backends.prepare(1, BATCH, decode, ()) == ("b", ("b", 5), []), "steps of single queries have no lists"
