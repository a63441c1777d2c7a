"""The CPU platform: how much memory KV blocks get, and large tensors that cost nothing until they are written."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from quire.platform import cpu
from quire.platform.cpu import CpuPlatform

MIB = 1 << 20


GIB = 1 << 30


@pytest.mark.parametrize(
    ("machine", "available", "one_request", "expected", "reason"),
    [
        (64 * GIB, 60 * GIB, 200 * MIB, GIB, "at most 1 GiB"),
        (64 * GIB, 60 * GIB, 3 * GIB, 3 * GIB, "one request of full length"),
        (64 * GIB, 60 * GIB, 9 * GIB, 64 * GIB // 10, "a tenth of the machine's memory"),
        (4 * GIB, 4 * GIB, 200 * MIB, 4 * GIB // 10, "a tenth of the machine's memory"),
        (64 * GIB, 400 * MIB, 200 * MIB, 100 * MIB, "a quarter of what is available"),
    ],
)
def test_kv_gets_a_modest_part_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, machine: int, available: int, one_request: int, expected: int, reason: str
) -> None:
    monkeypatch.setattr(cpu, "machine_memory", lambda: machine)
    assert CpuPlatform().default_kv_memory(available, one_request) == (expected, reason)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_running_out_of_memory_is_told_from_other_errors(error: Exception, expected: bool) -> None:
    assert CpuPlatform().is_out_of_memory(error) is expected


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


def test_no_error_is_sticky() -> None:
    assert not CpuPlatform().is_sticky(RuntimeError("out of memory"))


def test_start_sets_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    monkeypatch.setattr(cpu, "_DEFAULT_THREADS", 5)
    CpuPlatform().start(None)
    CpuPlatform().start(3)
    CpuPlatform().start(None)  # what an engine before changed is undone
    assert seen == [5, 3, 5]
