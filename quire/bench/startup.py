"""`bench startup`: how long a fresh process takes until it can serve, and where the time goes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from quire.bench.startup_probe import REFUSED
from quire.bench.stats import Distribution, distribution
from quire.types.errors import BenchmarkError, ConfigError

Probe = Callable[[str], dict[str, float]]  # settings as JSON -> when each phase ended, from the start in seconds


class StartupSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Phases in order, each without those before it; together they are the total."""

    repeats: int
    phases_ms: dict[str, Distribution]
    total_ms: Distribution

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


def bench_startup(settings: Mapping[str, Any], repeats: int, probe: Probe | None = None) -> StartupSummary:
    """Start `repeats` processes, one after the other. `settings` are those of LLM."""
    if repeats < 1:
        raise ConfigError(f"--repeats is {repeats} but must be at least 1")
    run = probe or run_probe
    encoded = json.dumps(dict(settings))
    runs = [phases(run(encoded)) for _ in range(repeats)]
    return StartupSummary(
        repeats=repeats,
        phases_ms={name: _distribution([each[name] for each in runs]) for name in runs[0]},
        total_ms=_distribution([sum(each.values()) for each in runs]),
    )


def phases(reached: Mapping[str, float]) -> dict[str, float]:
    """From the times at which phases ended to how long each took."""
    durations: dict[str, float] = {}
    before = 0.0
    for name, ended in reached.items():
        durations[name] = ended - before
        before = ended
    return durations


def run_probe(settings: str) -> dict[str, float]:
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "quire.bench.startup_probe", settings], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        cause = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        if done.returncode == REFUSED:
            raise BenchmarkError(cause)
        raise BenchmarkError(f"a started process failed with exit code {done.returncode}: {cause}")
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {name: when - begin for name, when in times.items()}


def _distribution(seconds: list[float]) -> Distribution:
    found = distribution(seconds, 1000)
    assert found is not None
    return found
