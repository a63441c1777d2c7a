"""`bench serve`: puts a load on a server and measures what its users would see. Imports no torch."""

from __future__ import annotations

import asyncio
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from quire.bench.client import OpenAIClient, clock
from quire.bench.data import Sample, load_samples
from quire.bench.load import arrival_times, run_load
from quire.bench.options import ServeOptions
from quire.bench.records import RequestRecord
from quire.bench.stats import Summary, summarize
from quire.frontend.progress import make_progress
from quire.types.errors import BenchmarkError


@dataclass(frozen=True)
class ServeResult:
    model: str  # as the server calls it
    summary: Summary
    records: list[RequestRecord]  # in the order of the prompts


def bench_serve(options: ServeOptions, *, progress: bool = True) -> ServeResult:
    """Measure a server. Blocks until every request has completed or failed."""
    samples = load_samples(
        options.data, extra=options.load.warmup, add_special_tokens=options.target.endpoint == "completions"
    )
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(measure(options, samples, progress=progress))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where there is one: the client then takes a third less of the machine that it measures."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


async def measure(options: ServeOptions, samples: list[Sample], *, progress: bool = False) -> ServeResult:
    """Measure with the given prompts; the last `warmup` of them are sent first and not counted."""
    split = len(samples) - options.load.warmup
    measured, warmup = samples[:split], samples[split:]
    async with OpenAIClient(options.target, options.ignore_eos()) as client:
        model = await client.find_model()
        if warmup:
            warmed = await _send_all(client, replace_rate(options), warmup, progress=False)
            _check_any_success(warmed, "of the warm-up")
        records = await _send_all(client, options, measured, progress)
    _check_any_success(records, "")
    return ServeResult(model, summarize(records, options.goodput), records)


async def _send_all(
    client: OpenAIClient, options: ServeOptions, samples: list[Sample], progress: bool
) -> list[RequestRecord]:
    load = options.load
    paced = not math.isinf(load.request_rate)
    due = arrival_times(len(samples), load.request_rate, load.arrival, load.ramp, options.data.seed)
    payloads = [client.payload(sample) for sample in samples]
    begin = clock()
    records: list[RequestRecord | None] = [None] * len(samples)
    with make_progress(len(samples), progress) as bar:

        async def send(index: int) -> None:
            record = await client.send(payloads[index], index, due[index] if paced else None, begin)
            if record.counted_chunks:
                record.prompt_tokens = samples[index].prompt_len or 0
            records[index] = record
            bar.advance(1, record.output_tokens)

        # The ramp applies to the rate if there is one, else to the concurrency.
        ramp = 0.0 if paced else load.ramp
        await run_load(due, send, max_concurrency=load.max_concurrency, ramp=ramp)
    return [record for record in records if record is not None]


def replace_rate(options: ServeOptions) -> ServeOptions:
    """The same load without waiting: a warm-up need not take the time of a ramp."""
    return replace(options, load=replace(options.load, request_rate=math.inf, ramp=0.0))


def _check_any_success(records: list[RequestRecord], which: str) -> None:
    failed = [record for record in records if record.error is not None]
    if records and len(failed) == len(records):
        first = failed[0]
        requests = " ".join(f"{len(failed)} requests {which}".split())
        raise BenchmarkError(f"all {requests} failed, the first with {first.error}: {first.message}")
