"""What it costs to journal open requests and to record a trace.

    python benchmarks/recording.py [--rounds 12] [--requests 32] [--tokens 64] [--model smollm2]

Two engine processes of the same model take turns: one as it is, the other with --trace behind a client that journals
its requests, as a server's does. Compared are the times of a batch and the times to the first token of one request,
pair by pair. Beside it, the time that recorder and journal take by themselves is counted in a run in this process:
a busy machine blurs the first and not the second. The limits are 2 % of throughput and 0.2 ms of TTFT.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import environment, write_results

from quire.config.engine import EngineConfig
from quire.engine.build import build_engine
from quire.engine.client import EngineClient
from quire.engine.journal import Journal
from quire.engine.loop import EngineLoop
from quire.engine.resuming import ResumingClient
from quire.engine.trace.recorder import TraceRecorder
from quire.engine.zmq_client import ZmqClient
from quire.replay.workload import simulated
from quire.types.request import EngineRequest

LIMITS = {"throughput": 0.02, "ttft_ms": 0.2}
PROMPT = 64
WRITTEN = ("took", "begin", "ready", "forced", "planned", "finished")  # of a recorder, while requests run
TAKEN = ("open", "take", "to_submit", "note_submitted")  # of a journal


def requests(round_number: int, count: int, tokens: int) -> list[EngineRequest]:
    return [
        simulated(f"{round_number}-{i}", [1000 + round_number, 2000 + i, *[11] * (PROMPT - 2)], tokens)
        for i in range(count)
    ]


async def run(client: EngineClient, batch: list[EngineRequest]) -> tuple[float, float]:
    """Seconds to the first token of any request, and to the end of all."""
    begin, first, num_open = time.perf_counter(), 0.0, len(batch)
    for request in batch:
        client.add_request(request)
    while num_open:
        outputs = (await client.get_outputs_async()).outputs
        if outputs and not first:
            first = time.perf_counter() - begin
        num_open -= sum(output.finish_reason is not None for output in outputs)
    return first, time.perf_counter() - begin


async def compare(args: argparse.Namespace, trace: Path) -> dict[str, Any]:
    engines = [ZmqClient(EngineConfig.from_flat(model=args.model, trace=path)) for path in (None, str(trace))]
    infos = [await engine.wait_ready_async() for engine in engines]
    recorded = ResumingClient(infos[1])
    await recorded.attach(engines[1])
    clients: list[EngineClient] = [engines[0], recorded]
    pairs: dict[str, list[list[float]]] = {"batch": [], "first": []}
    try:
        for number in range(-1, args.rounds):
            batch, one = requests(2 * number + 2, args.requests, args.tokens), requests(2 * number + 3, 1, 1)
            order = clients if number % 2 else clients[::-1]
            ends = {client: (await run(client, batch), await run(client, one)) for client in order}
            if number >= 0:  # the first round is a warm-up
                pairs["batch"].append([ends[client][0][1] for client in clients])
                pairs["first"].append([ends[client][1][0] for client in clients])
    finally:
        for engine in engines:
            await engine.stop_async()
            engine.shutdown()
    ratios = [with_it / without - 1 for without, with_it in pairs["batch"]]
    later = [1000 * (with_it - without) for without, with_it in pairs["first"]]
    return {
        "batch_seconds": pairs["batch"],
        "first_token_seconds": pairs["first"],
        "throughput_cost_median": statistics.median(ratios),
        "ttft_cost_ms_median": statistics.median(later),
        "trace_bytes": sum(file.stat().st_size for file in trace.parent.iterdir()),
    }


class Stopwatch:
    """Counts the processor time that some methods of an object take."""

    def __init__(self, thing: object, names: tuple[str, ...]) -> None:
        self.seconds = 0.0
        for name in names:
            setattr(thing, name, self._timed(getattr(thing, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begin = time.thread_time()
            try:
                return method(*arguments)
            finally:
                self.seconds += time.thread_time() - begin

        return timed


def count(args: argparse.Namespace, trace: Path) -> dict[str, Any]:
    """Run a batch in this process, and count."""
    core, _, _ = build_engine(EngineConfig.from_flat(model=args.model, trace=str(trace)))
    loop, journal = EngineLoop(core), Journal()
    assert isinstance(core.log, TraceRecorder)
    loop.submit(requests(-1, 1, 1)[0])  # opens the file
    while loop.has_unfinished():
        loop.run_once()
    recorder, keeper = Stopwatch(core.log, WRITTEN), Stopwatch(journal, TAKEN)
    begin, num_steps, num_tokens, first = time.perf_counter(), 0, 0, 0.0
    for request in requests(0, args.requests, args.tokens):
        entry = journal.open(request)
        loop.submit(entry.resumed())
    for entry in journal.to_submit():
        journal.note_submitted(entry)
    while loop.has_unfinished():
        outputs = journal.take(loop.run_once().outputs)
        num_steps += 1
        num_tokens += sum(len(output.token_ids) for output in outputs)
        first = first or recorder.seconds + keeper.seconds
    seconds = time.perf_counter() - begin
    loop.shutdown()
    spent = recorder.seconds + keeper.seconds
    return {
        "steps": num_steps,
        "tokens": num_tokens,
        "seconds": seconds,
        "recorder_us_per_step": 1e6 * recorder.seconds / num_steps,
        "journal_us_per_step": 1e6 * keeper.seconds / num_steps,
        "share_of_time": spent / seconds,
        "first_step_ms": 1000 * first,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "counted").mkdir()
        counted = count(args, Path(folder) / "counted" / "trace")
        print(counted, flush=True)
        compared = asyncio.run(compare(args, Path(folder) / "trace"))
    print({name: value for name, value in compared.items() if not isinstance(value, list)})
    results = {**vars(args), "limits": LIMITS, "counted": counted, "compared": compared}
    print(f"written to {write_results('recording', environment('quire', 'torch'), results)}")


if __name__ == "__main__":
    main()
