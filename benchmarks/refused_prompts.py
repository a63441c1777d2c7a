"""What refusing prompts that are far too long costs: time, memory of the API process, the stall of another stream.

    python benchmarks/refused_prompts.py [--before FOLDER]

The real server with the default model's tokenizer and a context of 8,192 tokens, over the fake engine of
api_process.py. With --before, the same requests go to the Quire in that folder first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from processes import resident_bytes
from report import environment, write_results
from rich.console import Console
from rich.table import Table

import quire
from quire.types.errors import EngineDeadError

RATE = 100.0  # tokens per second of the stream that is watched
MEGABYTE = 1 << 20
REQUESTS: dict[str, tuple[str, Callable[[], dict[str, Any]], int]] = {
    "15 MB of text": ("completions", lambda: {"prompt": "The quick brown fox. " * 750_000}, 1),
    "10 MB of 'a '": ("completions", lambda: {"prompt": "a " * 5_000_000}, 1),
    "10 MB of 'a ', four at once": ("completions", lambda: {"prompt": "a " * 5_000_000}, 4),
    "15 MB of chat": (
        "chat/completions",
        lambda: {"messages": [{"role": "user", "content": "The quick brown fox. " * 750_000}]},
        1,
    ),
    "200,000 messages": (
        "chat/completions",
        lambda: {"messages": [{"role": "user", "content": "Hello"}] * 200_000},
        1,
    ),
    "100,000 bad words": ("completions", lambda: {"prompt": "Hi", "bad_words": [f"w{i}" for i in range(100_000)]}, 1),
}


def start(folder: Path) -> tuple[subprocess.Popen[str], int]:
    """The server of the Quire in that folder, and its port."""
    script = Path(__file__).with_name("api_process.py")
    command = [sys.executable, str(script), "--serve", "--rate", str(RATE)]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(folder)}
    )
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"serving on http://\S+:(\d+), ready", line):
            return process, int(found[1])
    raise EngineDeadError("the server did not start")


def head(path: str, body: bytes) -> bytes:
    lines = f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{lines}Content-Length: {len(body)}\r\n\r\n".encode()


async def ask(port: int, path: str, body: bytes) -> int:
    """The status; 0 if the connection was lost."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head(path, body))
        writer.write(body)
        await writer.drain()
        line = await reader.readline()
        await reader.read()
        return int(line.split()[1]) if line else 0
    except ConnectionError:
        return 0
    finally:
        writer.close()


async def watch(port: int, gaps: list[float]) -> None:
    """Read a stream for ever, and note the time between its events."""
    body = json.dumps({"prompt": "Hi", "stream": True, "max_tokens": 8000}).encode()
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head("completions", body) + body)
        await reader.readuntil(b"data: ")
        last = time.monotonic()
        while await reader.read(1 << 16):
            now = time.monotonic()
            gaps.append(now - last)
            last = now
        writer.close()


async def measure(pid: int, port: int, path: str, body: bytes, count: int) -> dict[str, float]:
    gaps: list[float] = []
    peak = before = resident_bytes(pid)
    stream = asyncio.create_task(watch(port, gaps))
    await asyncio.sleep(1)
    quiet = max(gaps, default=0.0)
    gaps.clear()
    begin = time.monotonic()
    asked = asyncio.gather(*(ask(port, path, body) for _ in range(count)))
    while not asked.done():
        peak = max(peak, resident_bytes(pid))
        await asyncio.sleep(0.01)
    seconds = time.monotonic() - begin
    stall = max(gaps, default=seconds)
    await asyncio.sleep(1)
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)
    return {
        "status": max(asked.result()),
        "seconds": seconds,
        "stall_s": stall,
        "stall_before_s": quiet,
        "peak_mb": (peak - before) / MEGABYTE,
        "kept_mb": (resident_bytes(pid) - before) / MEGABYTE,
    }


def run(folder: Path) -> dict[str, dict[str, float]]:
    """Each kind of request against a server that has just started."""
    results = {}
    for name, (path, make, count) in REQUESTS.items():
        process, port = start(folder)
        try:
            asyncio.run(measure(process.pid, port, "completions", b'{"prompt": "Hi"}', 1))
            results[name] = asyncio.run(measure(process.pid, port, path, json.dumps(make()).encode(), count))
        finally:
            process.terminate()
            process.communicate()
    return results


def show(name: str, results: dict[str, dict[str, float]]) -> None:
    table = Table("request", "status", "s", "stall of a stream, ms", "peak, MB", "kept, MB", title=name)
    for request, row in results.items():
        table.add_row(
            request,
            f"{row['status']:.0f}",
            f"{row['seconds']:.2f}",
            f"{1000 * row['stall_s']:.0f}",
            f"{row['peak_mb']:.0f}",
            f"{row['kept_mb']:.0f}",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="folder of another Quire to compare with")
    args = parser.parse_args()
    folders = {"before": args.before, "after": Path(quire.__file__).parents[1]}
    results = {}
    for name, folder in folders.items():
        if folder is not None:
            results[name] = run(folder)
            show(name, results[name])
    print(f"written to {write_results('refused_prompts', environment('quire', 'tokenizers', 'uvicorn'), results)}")


if __name__ == "__main__":
    main()
