"""Engines that are loaded once, stopped while another is measured, and asked for the rows of the CPU tables by turns.

Shared by cpu_peers.py, which compares engines, and cpu_attempts.py, which compares commits of this repository.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peers import stop

LOWEST_TOKEN, HIGHEST_TOKEN = 100, 40_000
LOWER_IS_BETTER = {"ttft"}
GEMM_SIZES = (1024, 1536, 2048)
SUSTAINED_S = 0.1


class ProbeError(Exception):
    """An engine ended; the message has the last lines of its log."""


@dataclass
class Probe:
    """A loaded engine that answers over pipes; see cpu_probe.py."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    ready_s: float = 0.0
    peak_mb: float = 0.0

    def generate(self, prompts: list[list[int]], outputs: int) -> float:
        """Seconds that the engine takes for these prompts."""
        os.killpg(self.process.pid, signal.SIGCONT)
        self._send({"prompts": prompts, "outputs": outputs})
        seconds: float = self.receive()["seconds"]
        self.peak_mb = max(self.peak_mb, resident_mb(self.process.pid))
        os.killpg(self.process.pid, signal.SIGSTOP)
        return seconds

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            last = self.log.read_text(errors="replace").splitlines()[-8:]
            raise ProbeError("\n".join([f"{self.name} ended; its log {self.log} says last:", *last]))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _send(self, job: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()


@contextmanager
def loaded(name: str, argv: Sequence[str], environment: Mapping[str, str], log_path: Path) -> Iterator[Probe]:
    """An engine that has said that it is ready, and is stopped until it is asked."""
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | environment,
            start_new_session=True,
        )
        try:
            probe = Probe(name, process, log_path)
            probe.ready_s = probe.receive()["ready_s"]
            os.killpg(process.pid, signal.SIGSTOP)
            print(f"{name}: ready after {probe.ready_s:.1f} s", flush=True)
            yield probe
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGCONT)
            stop(process)


@dataclass
class Prompts:
    """Fresh ones every time: nothing is served from a cache."""

    ids: random.Random = field(default_factory=lambda: random.Random(0))

    def __call__(self, count: int, length: int) -> list[list[int]]:
        return [[self.ids.randint(LOWEST_TOKEN, HIGHEST_TOKEN) for _ in range(length)] for _ in range(count)]


def engine_rows(prompts: Prompts) -> dict[str, Callable[[Probe], float]]:
    """What is measured of an engine that generates."""

    def decode(probe: Probe) -> float:
        first = probe.generate(prompts(1, 128), 1)
        return 127 / (probe.generate(prompts(1, 128), 128) - first)

    return {
        "decode": decode,
        "ttft": lambda probe: 1e3 * probe.generate(prompts(1, 128), 1),
        "prefill": lambda probe: 1024 / probe.generate(prompts(1, 1024), 1),
        "batch": lambda probe: 32 * 128 / probe.generate(prompts(32, 128), 128),
    }


def best(row: str, values: Sequence[float]) -> float:
    return min(values) if row in LOWER_IS_BETTER else max(values)


class GemmPeak:
    """The cores' float32 matmuls, by torch's library; asked between the engines, to see the same minutes."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._squares = [torch.randn(size, size) for size in GEMM_SIZES]
        self.best: list[float] = []  # GFLOP/s of the fastest single matmul, a value per time that it was asked
        self.sustained: list[float] = []  # of all matmuls within SUSTAINED_S, at the size at which that is most

    def measure(self) -> None:
        torch.set_num_threads(self._threads)
        found = [self._rates(square) for square in self._squares]
        self.best.append(max(fastest for fastest, _ in found))
        self.sustained.append(max(overall for _, overall in found))

    def _rates(self, square: torch.Tensor) -> tuple[float, float]:
        operations, times = 2 * square.shape[0] ** 3 / 1e9, []
        square @ square
        while sum(times) < SUSTAINED_S:
            times.append(seconds(lambda: square @ square))
        return operations / min(times), operations * len(times) / sum(times)


def seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def resident_mb(session: int) -> float:
    """Memory of all processes of a session; pages they share count once."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[3]) == session:
                rollup = (stat.parent / "smaps_rollup").read_text()
                total += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total / 1024
