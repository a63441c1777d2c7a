"""How much memory the system leaves this process: free memory, and the limits of containers and of `ulimit`."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from quire.platform.base import MemorySupply

NO_LIMIT = 1 << 62
# Under `ulimit`: stacks and arenas of threads that are yet to start, and libraries that are loaded later. None of
# these takes memory worth a line in a ledger, and all of them take addresses.
RESERVED = 384 << 20

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_STATUS = Path("/proc/self/status")


def available_memory() -> MemorySupply:
    """What this process can still take, and what sets that bound."""
    bounds = (
        MemorySupply(_free_memory(), "free memory", "free some memory"),
        MemorySupply(cgroup_memory()[1], "the container's memory limit", "raise the container's memory limit"),
        MemorySupply(limit_headroom(resource.RLIMIT_AS, "VmSize"), "ulimit -v", "raise ulimit -v"),
        MemorySupply(limit_headroom(resource.RLIMIT_DATA, "VmData"), "ulimit -d", "raise ulimit -d"),
    )
    return min(bounds, key=lambda bound: bound.num_bytes)


def machine_memory() -> int:
    """All memory of the machine, or of the container that this process runs in."""
    return min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), cgroup_memory()[0])


def limit_headroom(limit: int, usage: str, status: Path = _STATUS) -> int:
    """What a resource limit leaves of what `usage` counts in /proc; a huge number where there is no limit."""
    allowed = resource.getrlimit(limit)[0]
    if allowed == resource.RLIM_INFINITY or not status.exists():  # not Linux, which enforces none of these either
        return NO_LIMIT
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return max(0, allowed - int(fields[usage].split()[0]) * 1024 - RESERVED)


def cgroup_memory(root: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> tuple[int, int]:
    """The least limit of the containers around this process, and what they leave it; huge outside of one."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # not Linux
        return NO_LIMIT, NO_LIMIT
    limit = headroom = NO_LIMIT
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
            allowed, left = _read_group(folder, *files)
            limit, headroom = min(limit, allowed), min(headroom, left)
    return limit, headroom


def _read_group(folder: Path, limit_file: str, usage_file: str, cache_key: str) -> tuple[int, int]:
    """Limit, and limit minus usage, where cached file pages that can be dropped at once do not count as used."""
    try:
        limit = (folder / limit_file).read_text().strip()
        usage = int((folder / usage_file).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return NO_LIMIT, NO_LIMIT
    if limit == "max":
        return NO_LIMIT, NO_LIMIT
    return int(limit), max(0, int(limit) - usage + int(stat.get(cache_key, 0)))


def _free_memory() -> int:
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except FileNotFoundError:  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
