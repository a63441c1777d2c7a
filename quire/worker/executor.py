"""Executor: how plans reach workers. One in this process for now; others send the same plans elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future

from quire.types.step import StepPlan, StepResult


class Executor(ABC):
    @abstractmethod
    def execute(self, plan: StepPlan) -> Future[StepResult]:
        """Start a step. Plans run in the order given; the future holds the result or the step's exception.

        May return before the step is done, and never raises for a failing step.
        """

    @abstractmethod
    def is_sticky(self, error: Exception) -> bool:
        """Whether nothing but a restart helps after this error."""

    @abstractmethod
    def shutdown(self) -> None: ...
