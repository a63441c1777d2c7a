"""Collectives: what ranks of a group exchange. A group of one uses the null version, which moves nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from quire.types.errors import ConfigError


class Collectives(ABC):
    gathers_parts = False  # whether a reader may add up what ranks have, instead of `all_reduce`

    def gather_parts(self, x: Tensor) -> Tensor:
        """The `x` of every rank in rank order, [ranks, *x.shape]; of those that gather parts."""
        raise AssertionError("sums over these ranks are not left to a reader")

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of `x` over the ranks, the same bits on all of them. May overwrite `x`."""

    @abstractmethod
    def all_gather(self, x: Tensor, total: int) -> Tensor:
        """The `x` [n, columns] of every rank side by side in rank order, [n, total].

        Ranks hold equal shares of the columns, rounded up; the last one may hold fewer.
        """

    def scatter_parts(self, x: Tensor) -> Tensor:
        """What every rank has of this one's rows of `x`, [ranks, share, width]; of those that gather parts."""
        raise AssertionError("sums over these ranks are not left to a reader")

    @abstractmethod
    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's rows of what `all_reduce` gives of x [n, width]: [n / ranks rounded up, width].

        Ranks hold equal shares of the rows, one after the other; behind the last row are zeros.
        """

    @abstractmethod
    def gather_rows(self, x: Tensor, total: int) -> Tensor:
        """The rows [total, width] that all ranks have together, as `reduce_scatter` leaves them."""

    def sum_by_shares(self, x: Tensor) -> Tensor:
        """What `all_reduce` gives, by a reduce-scatter and an all-gather of rows."""
        return self.gather_rows(self.reduce_scatter(x), x.shape[0])

    @abstractmethod
    def own_rows(self, x: Tensor) -> Tensor:
        """This rank's rows of `x`, which is the same on all of them."""

    def exchange(self, x: Tensor, routes: Tensor) -> Tensor:
        """Rows x [.., width], each from one rank to some: routes [.., 2] int64 has its source and a bit a reader.

        A rank's result has the rows that it reads; the others are anything. Only rows that it is the source of are
        read, and all ranks have the same routes.
        """
        raise ConfigError("these ranks cannot send rows to one another; leave --all2all-backend out")

    @property
    def is_broken(self) -> bool:
        """Whether a rank has failed, so that what was exchanged since may be anything."""
        return False

    @abstractmethod
    def minimum(self, values: Sequence[int]) -> list[int]:
        """The least of each value over the ranks. Waits for all of them; not for use within a step."""


class NullCollectives(Collectives):
    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, total: int) -> Tensor:
        return x

    reduce_scatter = own_rows = sum_by_shares = all_reduce
    gather_rows = all_gather

    def minimum(self, values: Sequence[int]) -> list[int]:
        return list(values)


class Failure(Protocol):
    """Whether a rank has failed, so that the others wait for it no longer; what they compute is then nothing."""

    @property
    def is_told(self) -> bool: ...

    def tell(self) -> None: ...
