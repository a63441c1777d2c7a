"""The CPU platform: everything is synchronous, so streams, events and graphs are null objects."""

from __future__ import annotations

import os

import numpy as np
import torch

from quire.platform.base import Event, NullEvent, Platform


class CpuPlatform(Platform):
    name = "cpu"
    device = torch.device("cpu")
    default_dtype = torch.float32
    default_max_num_seqs = 64
    default_max_num_batched_tokens = 512
    default_steps_in_flight = 1
    default_attention_backend = "torch_ref"

    def start(self, num_threads: int | None) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)

    def available_memory(self) -> int:
        return min(_free_memory(), _cgroup_headroom())

    def default_kv_memory(self, available: int) -> int:
        # A laptop runs other things: a quarter of what is free, and no more than 4 GiB unless asked for.
        return min(available // 4, 4 << 30)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # numpy asks the system for zero pages, which cost nothing until they are written; torch writes them.
        num_bytes = dtype.itemsize * int(np.prod(shape))
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)

    def is_sticky(self, error: Exception) -> bool:
        return False

    def event(self) -> Event:
        return NullEvent()

    def host_tensor(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype)


def _free_memory() -> int:
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except FileNotFoundError:  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_headroom() -> int:
    """What a container may still take; a huge number outside of one."""
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            maximum = limit.read().strip()
            return 1 << 62 if maximum == "max" else max(0, int(maximum) - int(used.read()))
    except OSError:
        return 1 << 62
