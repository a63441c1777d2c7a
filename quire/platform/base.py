"""Platform: the device behind the engine, its defaults and its memory. Where it has none, null objects stand in.

Only kernels/ and platform/ name a device; everything else asks the platform.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from quire.platform.allocator import return_free_memory
from quire.platform.recording import GraphPool

HOST = torch.device("cpu")  # where tables are computed whose bits must not depend on the device


class MemorySupply(NamedTuple):
    """Bytes that can be taken, what sets that bound ("ulimit -v"), and what moves it ("raise ulimit -v")."""

    num_bytes: int
    bound: str
    more: str


class DefaultMemory(NamedTuple):
    """Bytes that are taken when the user does not say, and the reason for the number."""

    num_bytes: int
    reason: str


class HostCopy:
    """Tensors that go to host memory and come back. This one is of tensors that are there already."""

    def move(self) -> None:
        """Free what they take of the device's memory; the tensors and all views of them are empty meanwhile."""

    def put_back(self) -> None:
        """Afterwards they may lie elsewhere. The copy of what is constant stays, for the next `move`."""


class Platform(ABC):
    name: str
    device: torch.device
    default_dtype: torch.dtype
    default_max_num_seqs: int
    default_max_num_batched_tokens: int
    default_steps_in_flight: int
    default_step_time_target: float  # seconds of a step with prompts while it delays others
    # What a step of a middling model takes, in seconds: in any case, for a row that decodes, for a prompt token, and
    # for a pair of a prompt token and a token before it.
    step_times: tuple[float, float, float, float]
    attention_backends: tuple[str, ...]  # in order of preference
    deterministic_backend: str  # the one for --deterministic; "": all are
    uses_host_memory: bool  # whether the engine's memory is the machine's own, which other processes take from too
    asynchronous: bool  # whether work goes on after the call that started it
    batch_invariant: bool  # whether a self-check makes matmuls independent of the batch
    graph_sizes: tuple[int, ...]  # numbers of rows for which decode steps are captured; none: no CUDA graphs
    mixed_graph_sizes: tuple[int, ...]  # numbers of tokens for which other steps are
    narrow_above: int | None  # steps of more tokens compute in the last layer only what is sampled from
    is_here = True  # not of a device that plans alone are made for

    @property
    def hardware(self) -> str:
        """What of the device the bits of results may depend on, besides instructions."""
        return self.name

    @property
    def num_cards(self) -> int:
        """Devices of this kind that this process sees."""
        return 1

    @abstractmethod
    def start(self, num_threads: int | None) -> None:
        """Prepare the process for this device. Called once, before any tensor work."""

    @abstractmethod
    def available_memory(self, utilization: float = 1.0, card: int = 0) -> MemorySupply:
        """What the engine may still take, right now; on a device of its own within this part of its memory."""

    @abstractmethod
    def peak_memory(self, work: Callable[[], None]) -> int | None:
        """Run `work` and say how much memory it took at most; None, without running it, where that is not known."""

    @abstractmethod
    def default_kv_memory(self, available: int, one_request: int) -> DefaultMemory:
        """How many of `available` bytes KV blocks get by default; a request of full length takes `one_request`."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A large zeroed tensor on the device; memory that is never touched may never be taken."""

    @abstractmethod
    def is_sticky(self, error: Exception) -> bool:
        """Whether the device is lost after this error, so that only a restart helps."""

    @abstractmethod
    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether this error says that the device's memory is used up."""

    def synchronize(self) -> None:
        """Block the host until the work that was started is done, where it goes on after the call."""
        return None

    def release_memory(self) -> None:
        """Give memory that was freed back to the system."""
        gc.collect()
        return_free_memory()

    def host_copy(
        self, constant: Iterable[torch.Tensor], changing: Iterable[torch.Tensor], cleared: Iterable[torch.Tensor]
    ) -> HostCopy:
        """Somewhere to keep these tensors while the device's memory is given back; nothing is copied yet.

        Those that are `cleared` come back as zeros, and are not kept.
        """
        return HostCopy()

    def graph_pool(self, num_bytes: int) -> GraphPool:
        """Memory for captured graphs, taken at once. Only where there are graph_sizes."""
        raise AssertionError(f"{self.name} has no graph_sizes")
