"""The CPU platform: how much memory there is, also inside a container, and large tensors that cost nothing yet."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from quire.platform import cpu
from quire.platform.cpu import NO_LIMIT, CpuPlatform

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
    return cpu._cgroup_headroom(tmp_path / "tree", tmp_path / "membership")


def test_a_container_limits_the_memory(tmp_path: Path) -> None:
    write_group(tmp_path / "tree", str(100 * MIB), used=60 * MIB, cached=25 * MIB)
    assert headroom(tmp_path, "0::/\n") == 65 * MIB, "cached file pages count as free"


def test_the_tightest_group_on_the_way_up_counts(tmp_path: Path) -> None:
    write_group(tmp_path / "tree" / "user" / "me", "max", used=50 * MIB, cached=0)
    write_group(tmp_path / "tree" / "user", str(80 * MIB), used=50 * MIB, cached=0)
    assert headroom(tmp_path, "0::/user/me\n") == 30 * MIB


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
    assert cpu._cgroup_headroom(tmp_path, tmp_path / "absent") == NO_LIMIT


def test_available_memory_is_what_the_system_says() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < CpuPlatform().available_memory() <= total


def test_kv_gets_a_quarter_of_a_small_machine_and_4_gib_of_a_large_one() -> None:
    assert CpuPlatform().default_kv_memory(400) == 100
    assert CpuPlatform().default_kv_memory(1 << 40) == 4 << 30


def test_zeros_take_no_memory_until_they_are_written() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    zeros = CpuPlatform().zeros((2, 256, MIB), torch.bfloat16)
    assert resident() - before < 64 * MIB, "1 GiB was asked for"
    assert zeros.shape == (2, 256, MIB)
    assert zeros.dtype == torch.bfloat16
    assert zeros[1, -1].count_nonzero() == 0
    zeros[0, 0, 0] = 1.5
    assert zeros[0, 0, 0].item() == 1.5


def test_events_are_plain() -> None:
    platform = CpuPlatform()
    event = platform.event()
    event.record()
    event.wait()
    assert not platform.is_sticky(RuntimeError("out of memory"))


def test_start_sets_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    monkeypatch.setattr(cpu, "_DEFAULT_THREADS", 5)
    CpuPlatform().start(None)
    CpuPlatform().start(3)
    CpuPlatform().start(None)  # what an engine before changed is undone
    assert seen == [5, 3, 5]
