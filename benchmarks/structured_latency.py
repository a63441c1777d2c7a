"""What a pathological schema costs others: the gaps between the tokens of a stream while such schemas come in.

    python benchmarks/structured_latency.py [--requests 2] [--repeats 3]

A real server with the default model and one stream; beside it requests for one token, each with a schema that the
server has not seen: trivial ones, and then deep, wide and large ones. The difference between the worst gaps is what
checking and compiling cost the stream. Gaps are as the client sees them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from report import environment, write_results
from rich.console import Console
from rich.table import Table

LIMIT_MS = 50.0
MILLION = 1_000_000
Schema = dict[str, Any]


def trivial(number: int) -> Schema:
    return _object({f"a{number}": {"type": "integer"}})


def deep(number: int) -> Schema:
    """As deep as is allowed, with a list that may nest for ever at the bottom."""
    schema: Schema = {"$ref": "#/$defs/tree"}
    for level in range(25):
        schema = _object({f"a{level}": schema, f"b{number}": {"type": "string"}})
    tree = _object({"children": {"type": "array", "items": {"$ref": "#/$defs/tree"}}})
    return {**schema, "$defs": {"tree": tree}}


def wide(number: int) -> Schema:
    """One of five thousand words."""
    return _object({"word": {"enum": [f"word-{number}-{index * 7919 % 5000:04}" for index in range(5000)]}})


def large(number: int) -> Schema:
    """A megabyte of properties."""
    names = [f"property_{number:04}_{index:05}" for index in range(13_000)]
    schema = _object({name: {"type": "string", "maxLength": 5} for name in names})
    assert 0.9 * MILLION < len(json.dumps(schema, separators=(",", ":"))) < (1 << 20)
    return schema


KINDS: dict[str, Callable[[int], Schema]] = {"trivial": trivial, "deep": deep, "wide": wide, "large": large}


def _object(properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


async def worst_gap(url: str, make: Callable[[int], Schema], requests: int, seed: int) -> tuple[float, set[int]]:
    """The longest time between two tokens of a stream, in ms, while requests come in; and their statuses."""
    bodies = [_body(make(seed * 1000 + number)) for number in range(requests)]
    limits = httpx.Limits(max_connections=10)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client, _stream(client) as tokens:
        gaps: list[float] = []

        async def read() -> None:
            last = time.perf_counter()
            async for _ in tokens:
                now = time.perf_counter()
                gaps.append(now - last)
                last = now

        await anext(tokens)
        reader = asyncio.create_task(read())
        try:
            statuses = set()
            for body in bodies:
                response = await client.post(
                    "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
                )
                statuses.add(response.status_code)
            assert not reader.done(), "the stream ended too early"
        finally:
            reader.cancel()
    return max(gaps) * 1000, statuses


def _body(schema: Schema) -> bytes:
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    messages = [{"role": "user", "content": "Hi"}]
    return json.dumps({"messages": messages, "max_tokens": 1, "response_format": wanted}).encode()


@asynccontextmanager
async def _stream(client: httpx.AsyncClient) -> AsyncIterator[AsyncIterator[str]]:
    body = {"prompt": "Once", "stream": True, "max_tokens": 7000, "ignore_eos": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        yield (line async for line in response.aiter_lines() if line)


async def measure(url: str, requests: int, repeats: int) -> dict[str, dict[str, Any]]:
    """The best of some worst gaps for each kind: what a kind costs is in all of them, what else happened is not."""
    found: dict[str, dict[str, Any]] = {kind: {"worst_gaps_ms": [], "statuses": []} for kind in KINDS}
    await worst_gap(url, trivial, requests, repeats)  # the first grammar of all makes the engine ready for grammars
    for repeat in range(repeats):
        for kind, make in KINDS.items():
            gap, statuses = await worst_gap(url, make, requests, repeat)
            found[kind]["worst_gaps_ms"].append(gap)
            found[kind]["statuses"] = sorted({*found[kind]["statuses"], *statuses})
    for kind in found.values():
        kind["worst_gap_ms"] = min(kind["worst_gaps_ms"])
    base = found["trivial"]["worst_gap_ms"]
    for kind in found.values():
        kind["added_ms"] = kind["worst_gap_ms"] - base
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2, help="of each kind, one after another")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--max-model-len", "8192"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        lines = (re.search(r"serving on (http://\S+), ready", line) for line in server.stdout)
        url = next(found[1] for found in lines if found is not None)
        try:
            results = asyncio.run(measure(url, options.requests, options.repeats))
        finally:
            server.terminate()
            server.communicate(timeout=60)
    table = Table("schemas", "status", "worst gap, ms", "added, ms", "limit")
    for kind, result in results.items():
        statuses = ", ".join(map(str, result["statuses"]))
        limit = "" if kind == "trivial" else f"{LIMIT_MS:.0f}"
        table.add_row(kind, statuses, f"{result['worst_gap_ms']:.1f}", f"{result['added_ms']:.1f}", limit)
    Console().print(table)
    print(f"written to {write_results('structured_latency', environment('torch', 'quire', 'llguidance'), results)}")


if __name__ == "__main__":
    main()
