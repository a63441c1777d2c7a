"""Collectives: what ranks of a group exchange. A group of one uses the null version, which moves nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class Collectives(ABC):
    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of `x` over the ranks. May overwrite `x`."""

    @abstractmethod
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """The `x` of every rank, concatenated along `dim` in rank order."""


class NullCollectives(Collectives):
    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x
