"""The CPU platform: everything is synchronous, so events are null objects."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from quire.platform.base import Event, NullEvent, Platform

NO_LIMIT = 1 << 62
_DEFAULT_THREADS = (
    torch.get_num_threads()
)  # read before an engine changes it: one per core, or as OMP_NUM_THREADS says


class CpuPlatform(Platform):
    name = "cpu"
    device = torch.device("cpu")
    default_dtype = torch.float32
    default_max_num_seqs = 64
    default_max_num_batched_tokens = 512
    default_steps_in_flight = 1
    attention_backends = ("cpu_native", "torch_ref")
    deterministic_backend = ""
    uses_host_memory = True
    asynchronous = False
    batch_invariant = True
    graph_sizes = ()
    narrow_above = 0

    def start(self, num_threads: int | None) -> None:
        torch.set_num_threads(num_threads or _DEFAULT_THREADS)

    def available_memory(self, utilization: float = 1.0) -> int:
        return min(_free_memory(), _cgroup_headroom())

    def peak_memory(self, work: Callable[[], None]) -> int | None:
        return None

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


def _free_memory() -> int:
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except FileNotFoundError:  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_headroom(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """What the containers around this process leave it; a huge number outside of one."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # not Linux
        return NO_LIMIT
    headroom = NO_LIMIT
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2: one tree for everything
            files, tree = ("memory.max", "memory.current", "inactive_file"), root
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            tree = root / "memory"
        else:
            continue
        # Inside a container the path may be the host's, which is not there; the tree's top then is the container.
        here = tree / path.lstrip("/")
        for folder in (folder for folder in (here, *here.parents) if folder.is_relative_to(tree)):
            headroom = min(headroom, _headroom_of(folder, *files))
    return headroom


def _headroom_of(folder: Path, limit_file: str, usage_file: str, cache_key: str) -> int:
    """Limit minus usage, where cached file pages that can be dropped at once do not count as used."""
    try:
        limit = (folder / limit_file).read_text().strip()
        usage = int((folder / usage_file).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return NO_LIMIT
    return NO_LIMIT if limit == "max" else max(0, int(limit) - usage + int(stat.get(cache_key, 0)))
