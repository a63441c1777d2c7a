"""The CPU platform: everything is synchronous."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from quire.platform.base import DefaultMemory, MemorySupply, Platform
from quire.platform.limits import available_memory, machine_memory

_ENOUGH_KV = 1 << 30  # for some requests of usual length; a laptop runs other things too
# Read before an engine changes it: one per core, or as OMP_NUM_THREADS says.
_DEFAULT_THREADS = torch.get_num_threads()


class CpuPlatform(Platform):
    name = "cpu"
    device = torch.device("cpu")
    default_dtype = torch.float32
    default_max_num_seqs = 64
    default_max_num_batched_tokens = 512
    default_steps_in_flight = 1
    default_step_time_target = 0.14
    step_times = (0.006, 0.002, 0.001, 5e-7)  # SmolLM2 135M on two cores
    attention_backends = ("cpu_native", "torch_ref")
    deterministic_backend = ""
    uses_host_memory = True
    asynchronous = False
    batch_invariant = True
    graph_sizes = ()
    mixed_graph_sizes = ()
    narrow_above = 0

    def start(self, num_threads: int | None) -> None:
        torch.set_num_threads(num_threads or _DEFAULT_THREADS)

    def available_memory(self, utilization: float = 1.0, card: int = 0) -> MemorySupply:
        return available_memory()

    def peak_memory(self, work: Callable[[], None]) -> int | None:
        return None

    def default_kv_memory(self, available: int, one_request: int) -> DefaultMemory:
        limits = (
            DefaultMemory(_ENOUGH_KV, "at most 1 GiB")
            if one_request <= _ENOUGH_KV
            else DefaultMemory(one_request, "one request of full length"),
            DefaultMemory(machine_memory() // 10, "a tenth of the machine's memory"),
            DefaultMemory(available // 4, "a quarter of what is available"),
        )
        return min(limits, key=lambda limit: limit.num_bytes)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # numpy asks the system for zero pages, which cost nothing until they are written; torch writes them.
        num_bytes = dtype.itemsize * int(np.prod(shape))
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)

    def is_sticky(self, error: Exception) -> bool:
        return False

    def is_out_of_memory(self, error: Exception) -> bool:
        return isinstance(error, MemoryError) or (
            isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
        )
