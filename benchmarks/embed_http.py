"""Embeddings over HTTP beside the engine alone: MiniLM on the CPU, 64 clients, texts of 64 tokens.

    python benchmarks/embed_http.py [--turns 5] [--batches 8 1] [--clients 64]

The same token ids go to `quire serve minilm`, whose clients each send one request after the other and get base64, and
to an engine in this process. The two take turns and change who begins; the median ratio of their rates counts. The
client and the API process run on the cores that the engine uses, so the cores that each of them took stand beside the
rates. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import statistics
import time
from typing import Any

import aiohttp
import numpy as np
import uvloop
from peers import DEFAULT_FOLDER, Running, running
from processes import children, cpu_seconds, resident_bytes
from report import environment, write_results
from rich.console import Console
from rich.table import Table

from quire import LLM

MODEL, MAX_NUM_SEQS = "minilm", 64  # as benchmarks/peers.py starts the server
MAX_QUEUE = 1024  # texts that wait: 64 clients with eight each are more than a server takes unless told
LENGTH = 64
TEXTS = 512  # of a turn, at least one request for each client
WANTED = 0.85  # of the engine's own rate
HEADERS = {"Content-Type": "application/json"}


class Clients:
    def __init__(self, server: Running, session: aiohttp.ClientSession, count: int) -> None:
        self._url, self._session, self._count = f"{server.url}/v1/embeddings", session, count

    async def send(self, bodies: list[bytes]) -> list[bytes]:
        """The answers to all of them, each client taking the next when its last is answered."""
        answers: list[bytes] = [b""] * len(bodies)
        waiting = iter(range(len(bodies)))

        async def client() -> None:
            for index in waiting:
                async with self._session.post(self._url, data=bodies[index], headers=HEADERS) as response:
                    answers[index] = await response.read()
                    assert response.status == 200, answers[index]

        await asyncio.gather(*(client() for _ in range(self._count)))
        return answers


def vectors_of(answers: list[bytes]) -> np.ndarray:
    parts = [item["embedding"] for answer in answers for item in json.loads(answer)["data"]]
    return np.stack([np.frombuffer(base64.b64decode(part), np.float32) for part in parts])


async def measure(server: Running, llm: LLM, batch: int, turns: int, num_clients: int) -> dict[str, Any]:
    api, (engine,) = server.process.pid, children(server.process.pid)
    draw, count = np.random.default_rng(batch), max(TEXTS, batch * num_clients)
    found: list[dict[str, float]] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=num_clients)) as session:
        clients = Clients(server, session, num_clients)
        for turn in range(turns + 1):  # the first warms up
            texts = [[101, *draw.integers(1000, 30000, LENGTH - 2).tolist(), 102] for _ in range(count)]
            bodies = [
                json.dumps({"model": MODEL, "input": texts[first : first + batch], "encoding_format": "base64"})
                for first in range(0, count, batch)
            ]
            payloads = [body.encode() for body in bodies]

            def alone(texts: list[list[int]] = texts) -> tuple[float, np.ndarray]:
                begin = time.perf_counter()
                outputs = llm.embed(texts, use_tqdm=False)
                return time.perf_counter() - begin, np.array([output.outputs.embedding for output in outputs])

            before = alone() if turn % 2 else None
            own, of_api, begin = time.process_time(), cpu_seconds(api), time.perf_counter()
            answers = await clients.send(payloads)
            served = time.perf_counter() - begin
            cpu = {"client": time.process_time() - own, "api": cpu_seconds(api) - of_api}
            seconds, expected = before or alone()
            assert np.abs(vectors_of(answers) - expected).max() < 1e-6, "the server gives other vectors"
            if turn:
                cores = {f"{name}_cores": used / served for name, used in cpu.items()}
                found.append({"engine_texts_per_s": count / seconds, "texts_per_s": count / served, **cores})
    medians = {name: statistics.median(turn[name] for turn in found) for name in found[0]}
    ratios = [turn["texts_per_s"] / turn["engine_texts_per_s"] for turn in found]
    return {
        **{"clients": num_clients, "batch": batch, "tokens": LENGTH, "texts": count, "turns": found, **medians},
        **{"ratio": statistics.median(ratios), "wanted": WANTED},
        "resident_bytes": {"api": resident_bytes(api), "engine": resident_bytes(engine)},
    }


async def compare(server: Running, args: argparse.Namespace) -> list[dict[str, Any]]:
    llm = LLM(MODEL, max_num_seqs=MAX_NUM_SEQS)
    return [await measure(server, llm, batch, args.turns, args.clients) for batch in args.batches]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 1], help="texts of a request")
    parser.add_argument("--clients", type=int, default=64)
    args = parser.parse_args()
    with running("quire", DEFAULT_FOLDER, MODEL, ("--max-queue", str(MAX_QUEUE))) as server:
        results = uvloop.run(compare(server, args))
    show(results)
    print(f"written to {write_results('embed_http', environment('quire', 'torch'), results)}")


def show(results: list[dict[str, Any]]) -> None:
    columns = ("texts/s", "engine alone", "share", "wanted", "cores of the client", "of the API", "MB, API + engine")
    table = Table("texts of a request", *columns, title="MiniLM over HTTP, base64")
    for row in results:
        memory = " + ".join(f"{size / 1e6:.0f}" for size in row["resident_bytes"].values())
        rates = f"{row['texts_per_s']:.0f}", f"{row['engine_texts_per_s']:.0f}", f"{row['ratio']:.1%}"
        cores = f"{row['client_cores']:.2f}", f"{row['api_cores']:.2f}"
        table.add_row(str(row["batch"]), *rates, f"{WANTED:.0%}", *cores, memory)
    Console().print(table)


if __name__ == "__main__":
    main()
