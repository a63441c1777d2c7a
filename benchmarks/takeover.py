"""How soon a server answers again after its engine was killed: with a spare process, and without.

    python benchmarks/takeover.py [--repeats 3] [--streams 8]

`quire serve` on the default model. Its engine gets SIGKILL while streams run; from then on a client asks again and
again, and the clock stops at the first token. Every repeat is a server of its own, since a second death within
minutes waits longer before its restart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from processes import resident_bytes
from report import environment, write_results
from rich.console import Console
from rich.table import Table

LIMITS = {"seconds": 4.0, "spare_bytes": 300 << 20}
BODY = {"prompt": "Once upon a time", "max_tokens": 512, "ignore_eos": True, "stream": True}
PAUSE = 0.02  # seconds between two attempts
SETTLE = 2.0  # seconds for the streams to run


@contextmanager
def server(*flags: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


def wait_line(process: subprocess.Popen[str], pattern: str) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(pattern, line):
            return found[1]
    raise SystemExit(f"the server ended before it said {pattern!r}")


async def ask(port: int, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return reader, writer


async def first_token(port: int) -> bool:
    """Whether an attempt got a token; one that is refused or cut off did not."""
    reader, writer = await ask(port, {**BODY, "max_tokens": 1})
    try:
        answer = await reader.read()
    finally:
        writer.close()
    return b'"finish_reason":"length"' in answer.replace(b" ", b"")


async def kill_and_wait(port: int, pid: int, streams: int) -> float:
    """Seconds from the kill to the next token."""
    running = [await ask(port, BODY) for _ in range(streams)]
    drains = [asyncio.create_task(reader.read()) for reader, _ in running]
    await asyncio.sleep(SETTLE)
    os.kill(pid, signal.SIGKILL)
    begin = time.monotonic()
    while not await first_token(port):
        await asyncio.sleep(PAUSE)
    seconds = time.monotonic() - begin
    for drain in drains:  # they go on in the next engine
        drain.cancel()
    for _, writer in running:
        writer.close()
    return seconds


def measure(with_spare: bool, streams: int) -> dict[str, float]:
    with server() if with_spare else server("--no-spare-engine") as process:
        pid = int(wait_line(process, r"engine process (\d+) is ready"))
        port = int(wait_line(process, r"serving on http://\S+:(\d+), ready"))
        resident = 0
        if with_spare:
            resident = resident_bytes(int(wait_line(process, r"engine process (\d+) stands by")))
        return {"seconds": asyncio.run(kill_and_wait(port, pid, streams)), "spare_bytes": resident}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8, help="running when the engine is killed")
    args = parser.parse_args()
    kinds = {"spare": True, "no spare": False}
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for _ in range(args.repeats):  # the two take turns, so that a slow moment of the machine meets both
        for kind, with_spare in kinds.items():
            runs[kind].append(measure(with_spare, args.streams))
            print(f"{kind}: {runs[kind][-1]['seconds']:.2f} s")
    table = Table("", "median, s", "worst, s", "limit, s", "spare process", title="From SIGKILL to the next token")
    for kind, found in runs.items():
        seconds = [run["seconds"] for run in found]
        memory = max(run["spare_bytes"] for run in found) / 2**20
        limit = f"{LIMITS['seconds']:g}" if kinds[kind] else ""
        table.add_row(kind, f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}", limit, f"{memory:.0f} MiB")
    Console().print(table)
    results = {"streams": args.streams, "limits": LIMITS, "runs": runs}
    print(f"written to {write_results('takeover', environment('quire', 'torch'), results)}")


if __name__ == "__main__":
    main()
