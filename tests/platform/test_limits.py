"""How much memory there is: in a container, under `ulimit`, and on a machine without either."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from quire.platform import limits
from quire.platform.limits import NO_LIMIT, RESERVED, available_memory, cgroup_memory, limit_headroom, machine_memory

MIB = 1 << 20


def write_group(folder: Path, limit: str, used: int, cached: int, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    key = "inactive_file" if version == 2 else "total_inactive_file"
    (folder / "memory.stat").write_text(f"anon {used - cached}\n{key} {cached}\n")


def headroom(tmp_path: Path, membership: str) -> int:
    (tmp_path / "membership").write_text(membership)
    return cgroup_memory(tmp_path / "tree", tmp_path / "membership")[1]


def test_a_container_limits_the_memory(tmp_path: Path) -> None:
    write_group(tmp_path / "tree", str(100 * MIB), used=60 * MIB, cached=25 * MIB)
    assert headroom(tmp_path, "0::/\n") == 65 * MIB, "cached file pages count as free"


def test_the_tightest_group_on_the_way_up_counts(tmp_path: Path) -> None:
    write_group(tmp_path / "tree" / "user" / "me", "max", used=50 * MIB, cached=0)
    write_group(tmp_path / "tree" / "user", str(80 * MIB), used=50 * MIB, cached=0)
    assert headroom(tmp_path, "0::/user/me\n") == 30 * MIB
    assert cgroup_memory(tmp_path / "tree", tmp_path / "membership") == (80 * MIB, 30 * MIB)


def test_a_path_of_the_host_is_not_there(tmp_path: Path) -> None:
    write_group(tmp_path / "tree", str(100 * MIB), used=10 * MIB, cached=0)
    assert headroom(tmp_path, "0::/docker/0123\n") == 90 * MIB


def test_version_1(tmp_path: Path) -> None:
    write_group(tmp_path / "tree" / "memory" / "job", str(100 * MIB), used=70 * MIB, cached=20 * MIB, version=1)
    assert headroom(tmp_path, "4:memory:/job\n2:cpu,cpuacct:/job\n") == 50 * MIB


def test_more_used_than_allowed_leaves_nothing(tmp_path: Path) -> None:
    write_group(tmp_path / "tree", str(10 * MIB), used=11 * MIB, cached=0)
    assert headroom(tmp_path, "0::/\n") == 0


@pytest.mark.parametrize("membership", ["0::/\n", "1:name=systemd:/\n", ""])
def test_no_container(tmp_path: Path, membership: str) -> None:
    assert headroom(tmp_path, membership) == NO_LIMIT
    assert cgroup_memory(tmp_path, tmp_path / "absent") == (NO_LIMIT, NO_LIMIT)


def test_available_memory_is_what_the_system_says() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < available_memory().num_bytes <= total
    assert 0 < machine_memory() <= total


def test_ulimit_leaves_what_is_not_used_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmSize:\t  102400 kB\nVmData:\t  51200 kB\n")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1000 * MIB, resource.RLIM_INFINITY))
    assert limit_headroom(resource.RLIMIT_AS, "VmSize", status) == 900 * MIB - RESERVED
    assert limit_headroom(resource.RLIMIT_DATA, "VmData", status) == 950 * MIB - RESERVED
    monkeypatch.setattr(resource, "getrlimit", lambda which: (50 * MIB, resource.RLIM_INFINITY))
    assert limit_headroom(resource.RLIMIT_AS, "VmSize", status) == 0
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert limit_headroom(resource.RLIMIT_AS, "VmSize", status) == NO_LIMIT


def test_the_tightest_bound_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "cgroup_memory", lambda: (7 * MIB, 5 * MIB))
    assert available_memory() == (5 * MIB, "the container's memory limit", "raise the container's memory limit")
    assert machine_memory() == 7 * MIB
    left = {"VmSize": 4 * MIB, "VmData": 9 * MIB}
    monkeypatch.setattr(limits, "limit_headroom", lambda which, usage: left[usage])
    assert available_memory()[:2] == (4 * MIB, "ulimit -v")
    left["VmData"] = 3 * MIB
    assert available_memory()[:2] == (3 * MIB, "ulimit -d")
