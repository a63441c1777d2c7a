"""What `--journal` and `--trace` cost requests with an Idempotency-Key, over HTTP.

    python benchmarks/journal.py [--rounds 10] [--requests 16] [--tokens 64] [--model smollm2]

Three `quire serve` of the same model take turns with the same streamed chats, each under a key of its own: one as it
is, one with --journal, one with --journal and --trace. Compared, round by round, are the time of a batch, the
processor time that both processes of a server take for it, and the time to the first token of one request. Beside it,
the processor time for a line of the journal is counted in this process, with a file on the same disk. A busy machine
blurs what the wall clock says, and processor time less. The limits are 2 % of throughput and 0.2 ms of TTFT, for both
together.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from kills import Server, serving
from report import environment, write_results

from quire.server.generation.record import Record
from quire.server.journal import JournalFolder
from quire.types.events import TextDelta
from quire.types.outputs import CompletionOutput, RequestOutput

LIMITS = {"throughput": 0.02, "ttft_ms": 0.2}
WAYS = ("plain", "journal", "journal_and_trace")
LINES = 5000


async def ask(http: httpx.AsyncClient, number: int, key: str, tokens: int) -> float:
    """Seconds to the first token of a chat; returns when it has ended."""
    talk = [{"role": "user", "content": f"Tell me tale number {number} of the sea."}]
    body = {"messages": talk, "stream": True, "max_tokens": tokens, "ignore_eos": True, "seed": number}
    begin, first = time.perf_counter(), 0.0
    async with http.stream("POST", "v1/chat/completions", json=body, headers={"idempotency-key": key}) as answer:
        assert answer.status_code == 200, (await answer.aread()).decode()
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and not first:
                first = time.perf_counter() - begin
    return first


async def turn(server: Server, number: int, args: argparse.Namespace) -> dict[str, float]:
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as http:
        names = range(args.requests)
        cpu, begin = cpu_seconds(server), time.perf_counter()
        await asyncio.gather(*(ask(http, 1000 * number + i, f"{number}-{i}", args.tokens) for i in names))
        batch, spent = time.perf_counter() - begin, cpu_seconds(server)
        firsts = [await ask(http, 1000 * number + 500 + i, f"{number}-first-{i}", 1) for i in range(args.firsts)]
    api, engine = (after - before for before, after in zip(cpu, spent, strict=True))
    return {"batch": batch, "api_cpu": api, "engine_cpu": engine, "first": statistics.median(firsts)}


def cpu_seconds(server: Server) -> tuple[float, float]:
    """Processor time of the server's process and of its engine's so far."""
    found = []
    for pid in (server.process.pid, server.pid):
        times = [file.read_text().split()[0] for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        found.append(sum(map(int, times)) / 1e9)
    return found[0], found[1]


async def compare(servers: dict[str, Server], args: argparse.Namespace) -> dict[str, Any]:
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(-1, args.rounds):
        order = WAYS if number % 2 else WAYS[::-1]
        found = {way: await turn(servers[way], number + 1, args) for way in order}
        if number >= 0:  # the first round is a warm-up
            rounds.append({way: found[way] for way in WAYS})
            print(
                {way: {name: round(value, 4) for name, value in times.items()} for way, times in found.items()},
                flush=True,
            )
    results: dict[str, Any] = {"rounds": rounds}
    for way in WAYS[1:]:
        later = [1000 * (each[way]["first"] - each["plain"]["first"]) for each in rounds]
        slower = [each[way]["batch"] / each["plain"]["batch"] - 1 for each in rounds]
        cpu = {name: sum(each[name]["api_cpu"] + each[name]["engine_cpu"] for each in rounds) for name in WAYS}
        api = sum(each[way]["api_cpu"] - each["plain"]["api_cpu"] for each in rounds)
        results[way] = {
            "cpu_cost": cpu[way] / cpu["plain"] - 1,
            "api_cpu_us_per_token": 1e6 * api / (len(rounds) * args.requests * args.tokens),
            "throughput_cost_median": statistics.median(slower),
            "throughput_cost_quartiles": statistics.quantiles(slower, n=4),
            "ttft_cost_ms_median": statistics.median(later),
            "ttft_cost_ms_quartiles": statistics.quantiles(later, n=4),
        }
    return results


def count(folder: Path) -> dict[str, float]:
    """Processor time of the lines that one stream leaves, one for each of its tokens."""
    journal = JournalFolder(folder, ".counted", 3600.0)
    journal.open("counted", b"{}")
    record = Record(journal.writer("counted"))
    said = CompletionOutput(0, " tale", [7000], events=[TextDelta(" tale")])
    output = RequestOutput("chat", "", [1] * 64, [said], finished=False, num_cached_tokens=0)
    wall, begin = time.perf_counter(), time.thread_time()
    for _ in range(LINES):
        record.add_output(0, 0, output)
    spent = time.thread_time() - begin
    size = sum(file.stat().st_size for file in folder.iterdir())
    return {
        "cpu_us_per_token": 1e6 * spent / LINES,
        "wall_us_per_token": 1e6 * (time.perf_counter() - wall) / LINES,
        "bytes_per_token": size / LINES,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=16, help="of a batch")
    parser.add_argument("--firsts", type=int, default=5, help="requests in a round for the time to a first token")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    load = os.getloadavg()[0]  # before: above 1, others were at work
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        for kind in ("counted", "one", "both"):
            (folder / kind).mkdir(mode=0o700)
        counted = count(folder / "counted")
        print(counted, flush=True)
        trace = ("--trace", str(folder / "trace"))
        flags = ((), ("--journal", str(folder / "one")), ("--journal", str(folder / "both"), *trace))
        servers = {way: stack.enter_context(serving(args.model, *of)) for way, of in zip(WAYS, flags, strict=True)}
        compared = asyncio.run(compare(servers, args))
        load_after = os.getloadavg()[0]
    print({way: compared[way] for way in WAYS[1:]})
    results = {
        **vars(args),
        "load_average": [load, load_after],
        "limits": LIMITS,
        "counted": counted,
        "compared": compared,
    }
    print(f"written to {write_results('journal', environment('quire', 'torch'), results)}")


if __name__ == "__main__":
    main()
