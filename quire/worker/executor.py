"""Executor: the boundary between an engine and its workers, which may be in other processes.

Everything that passes it is data: the description of a worker, plans and masks in, results out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.types.errors import ConfigError, QuireError
from quire.types.masks import Masks
from quire.types.request import AdapterRef
from quire.types.step import StartedStep, StepPlan

if TYPE_CHECKING:  # it knows the ledger, and the ledger torch
    from quire.worker.description import WorkerDescription


class Executor(ABC):
    description: WorkerDescription
    """What the worker has taken and how it runs steps."""

    failure: QuireError | None = None
    """Why no step can run any more, if that is known before one is tried."""

    on_failure: Callable[[], None] = staticmethod(lambda: None)
    """Called, on any thread, when `failure` is set."""

    @abstractmethod
    def execute(self, plan: StepPlan) -> StartedStep:
        """Start a step. Plans run in the order given.

        May return before the step is done, and never raises for a failing step. A step with mask_slots computes
        logits, then waits for its `sample`; no other may be started meanwhile.
        """

    def mask_room(self, count: int) -> Masks:
        """Return an array of `count` masks to write into for `sample`. Masks written before may be lost."""
        return np.empty((count, -(-self.description.vocab_size // 32)), dtype=np.int32)

    def capture_next(self) -> bool:
        """Do something that steps to come will need; False if there is nothing.

        Called while no step is in flight. Takes some milliseconds, or seconds where kernels must be compiled; never
        raises.
        """
        return False

    def read_adapter(self, ref: AdapterRef) -> Future[int]:
        """Bring a LoRA adapter into the workers' host memory, whole and checked: the bytes that it takes.

        Plans may name it in adapter_loads from then on, until `forget_adapter`. QuireError if it cannot be served.
        """
        return refused("adapters are not enabled; start the engine with --enable-lora")

    def forget_adapter(self, digest: str) -> None:
        """No later plan loads it."""
        return None

    def sleep(self, level: int) -> Future[str]:
        """Give the device's memory back: KV blocks, and weights, which level 1 keeps in host memory.

        No step is in flight, and none is started before `wake` is done. EngineDeadError if it cannot go on.
        """
        return refused("these workers cannot sleep; start the engine with another --executor")

    def wake(self) -> Future[str]:
        """Take the memory again. Nothing is in rows, blocks and slots of adapters, as at the start."""
        return refused("these workers cannot wake; start the engine with another --executor")

    def update_weights(self, path: str) -> Future[str]:
        """Replace all weights by those of another folder of the same model; the result is their digest.

        No step is in flight, and none is started before it is done. Rows, blocks and slots are as at the start then.
        QuireError, and the weights are what they were, if these cannot be used.
        """
        return refused("these workers cannot update their weights; start the engine with another --executor")

    def call_workers(self, call: Callable[[Any], Any]) -> list[Any]:
        """Call something with the worker of each rank, in rank order. No step is in flight."""
        raise ConfigError(
            "collective_rpc runs a callable with each worker, and these are other processes, which take data and"
            " never pickled code; use one rank in this process (tensor_parallel_size 1, pipeline_parallel_size 1)"
        )

    @abstractmethod
    def is_sticky(self, error: Exception) -> bool:
        """Whether nothing but a restart helps after this error of a step."""

    @abstractmethod
    def shutdown(self) -> None: ...


def refused(why: str) -> Future[Any]:
    failed: Future[Any] = Future()
    failed.set_exception(ConfigError(why))
    return failed
