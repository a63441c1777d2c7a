"""When each request is sent: arrival times at a rate, and a number of workers that bounds the concurrency."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence

from quire.bench.options import Arrival


def arrival_times(
    count: int, rate: float, arrival: Arrival = "poisson", ramp: float = 0.0, seed: int | str = 0
) -> list[float]:
    """Seconds from the start of the run at which each request is due, in order; the first is due at once.

    With `ramp` the rate grows linearly from 0 to `rate` within `ramp` seconds.
    """
    if math.isinf(rate):
        return [0.0] * count
    generator = random.Random(f"arrivals/{seed}")
    expected = 0.0  # requests expected to have arrived by then
    times = []
    for _ in range(count):
        times.append(_when(expected, rate, ramp))
        expected += generator.expovariate(1.0) if arrival == "poisson" else 1.0
    return times


def _when(expected: float, rate: float, ramp: float) -> float:
    """The time at which `expected` requests are expected: the inverse of the rate's integral."""
    if expected < rate * ramp / 2:
        return math.sqrt(2 * ramp * expected / rate)
    return expected / rate + ramp / 2


async def run_load(
    due: Sequence[float],
    send: Callable[[int], Awaitable[None]],
    *,
    max_concurrency: int | None = None,
    ramp: float = 0.0,
) -> None:
    """Await send(index) for each request once it is due, at most `max_concurrency` at a time.

    With `ramp` the workers start one after the other within `ramp` seconds.
    """
    loop = asyncio.get_running_loop()
    begin = loop.time()
    num_workers = min(max_concurrency or len(due), len(due))
    waiting = iter(enumerate(due))

    async def work(joins: float) -> None:
        await _sleep_until(begin + joins)
        for index, when in waiting:
            await _sleep_until(begin + when)
            await send(index)

    async with asyncio.TaskGroup() as group:
        for worker in range(num_workers):
            group.create_task(work(ramp * worker / num_workers))


async def _sleep_until(when: float) -> None:
    remaining = when - asyncio.get_running_loop().time()
    if remaining > 0:
        await asyncio.sleep(remaining)
