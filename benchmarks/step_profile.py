"""Where the time of a steady step goes: kernels, what the device waits for between them, and the host's parts.

Used by benchmarks/speculation.py --profile.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from gpu_profile import added_times, show

SHORT = 1.0  # microseconds between kernels that are no gap


@contextmanager
def timed(parts: Mapping[str, tuple[Any, str]]) -> Iterator[dict[str, list[float]]]:
    """Seconds of each call of some methods, by the names of `parts`: (object or class, method). A part of another
    part's time counts in both."""
    found: dict[str, list[float]] = {name: [] for name in parts}
    before = {name: getattr(owner, method) for name, (owner, method) in parts.items()}

    def wrapped(call: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
        def run(*args: Any, **given: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **given)
            finally:
                times.append(time.perf_counter() - begin)

        return run

    for name, (owner, method) in parts.items():
        setattr(owner, method, wrapped(before[name], found[name]))
    try:
        yield found
    finally:
        for name, (owner, method) in parts.items():
            if isinstance(owner, type):
                setattr(owner, method, before[name])
            else:
                delattr(owner, method)


def gaps(events: Any) -> dict[str, list[float]]:
    """Microseconds in which the device had nothing to do, by the kernels before and after."""
    found: dict[str, list[float]] = defaultdict(list)
    kernels = [event for event in events if event.device_type.name == "CUDA"]
    until, last = 0.0, ""
    for event in sorted(kernels, key=lambda event: event.time_range.start):
        idle = event.time_range.start - until
        if last and idle > SHORT:
            found[f"{last[:45]} -> {event.name[:45]}"].append(idle)
        if event.time_range.end > until:
            until, last = event.time_range.end, event.name
    return found


def show_steps(title: str, run: Callable[[], object], num_steps: int, parts: Mapping[str, tuple[Any, str]]) -> None:
    """Print what a step of `run`, which has about `num_steps` of them, takes: of the host first, then of the device.

    `run` goes twice: the profiler is off while the host is timed.
    """
    begin = time.perf_counter()
    with timed(parts) as found:
        run()
    whole = time.perf_counter() - begin
    print(f"\n{title}: {1e6 * whole / num_steps:.0f} us a step")
    for name, times in found.items():
        count = len(times) / num_steps
        print(f"  host {1e6 * sum(times) / num_steps:9.1f} us {count:6.2f} x  {name}", flush=True)
    if not torch.cuda.is_available():
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = profile.events()
    times, counts = added_times(events)
    per_step = ({k: v / num_steps for k, v in part.items()} for part in (times, counts))
    show(f"{title}, kernels of a step", *per_step, most=24)
    idle = gaps(events)
    total = sum(map(sum, idle.values()))
    print(f"\n{title}: the device is idle for {total / num_steps:.0f} us a step; the longest gaps, per step:")
    for pair, waits in sorted(idle.items(), key=lambda item: -sum(item[1]))[:16]:
        print(f"{sum(waits) / num_steps:9.1f} us {len(waits) / num_steps:7.2f} x  {pair}", flush=True)
