"""Collectives: what ranks of a group exchange. A group of one uses the null version, which moves nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Collectives(ABC):
    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of `x` over the ranks, the same bits on all of them. May overwrite `x`."""

    @abstractmethod
    def all_gather(self, x: Tensor, total: int) -> Tensor:
        """The `x` [n, columns] of every rank side by side in rank order, [n, total].

        Ranks hold equal shares of the columns, rounded up; the last one may hold fewer.
        """

    @abstractmethod
    def minimum(self, values: Sequence[int]) -> list[int]:
        """The least of each value over the ranks. Waits for all of them; not for use within a step."""


class NullCollectives(Collectives):
    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, total: int) -> Tensor:
        return x

    def minimum(self, values: Sequence[int]) -> list[int]:
        return list(values)


class Failure(Protocol):
    """Whether a rank has failed, so that the others wait for it no longer; what they compute is then nothing."""

    @property
    def is_told(self) -> bool: ...

    def tell(self) -> None: ...
