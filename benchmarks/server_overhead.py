"""What the server (HTTP, messages, text) adds to the engine alone, on the default model.

    python benchmarks/server_overhead.py [--seconds 85]

The same prompts go through `quire serve` and through an engine in this process, which takes and gives token ids: no
HTTP, no messages between processes, no text. The two take turns and change who begins, so that a slow moment of the
machine meets both, and the median over the turns counts: of ratios for throughput, of differences for first tokens.

Throughput: 16 requests at once, 32 tokens in and 64 out. Short prompts are the hard case: most steps then give
every stream a token. Beside it stands the CPU time that the API process and this client took meanwhile, on the cores
that the engine uses. First token: one request at a time, as token ids, and as a conversation, whose rendering and
tokens are the server's work.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import uvloop
from peers import DEFAULT_FOLDER, Running, running
from processes import cpu_seconds
from report import environment, write_results
from rich.console import Console
from rich.table import Table

from quire.bench.client import OpenAIClient, clock
from quire.bench.data import Sample
from quire.bench.options import TargetOptions
from quire.config.engine import EngineConfig
from quire.engine.client import make_inproc_client
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams

MODEL = "smollm2"
MAX_NUM_SEQS = 64  # as benchmarks/peers.py starts the server
SIDES = ("engine", "server")
STREAMS, INPUT, OUTPUT = 16, 32, 64
FIRST_OUTPUT = 4  # not 1: in use, the next step competes with what sends the first token
LIMITS = {"throughput": 0.08, "ttft_ms": 10.0}

Times = tuple[float, float]  # seconds until all is done, and until the first token
Turn = Callable[[], Awaitable[tuple[Times, Times]]]


class Engine:
    """The engine in this process, without a server around it."""

    def __init__(self) -> None:
        self._client = make_inproc_client(EngineConfig.from_flat(model=MODEL, max_num_seqs=MAX_NUM_SEQS))
        self._num_requests = 0

    def run(self, token_ids: list[list[int]], outputs: int) -> Times:
        """Seconds for all of them at once, and until the first of all tokens."""
        params = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True)
        first = None
        num_open = len(token_ids)
        begin = clock()
        for ids in token_ids:
            self._num_requests += 1
            name = str(self._num_requests)
            self._client.add_request(EngineRequest(request_id=name, token_ids=ids, params=params, max_tokens=outputs))
        while num_open:
            for output in self._client.get_outputs().outputs:
                if first is None and output.token_ids:
                    first = clock() - begin
                num_open -= output.finish_reason is not None
        assert first is not None
        return clock() - begin, first

    def stop(self) -> None:
        self._client.shutdown()


class Server:
    """The same through the server, by the client of `quire bench serve`."""

    def __init__(self, running: Running) -> None:
        url = running.url
        # A token may be a part of a letter, whose text comes with the next one; with ids it is sent at once.
        ids = {"return_token_ids": True}
        self.ids = OpenAIClient(TargetOptions(base_url=url, ignore_eos=True, extra_body=ids), ignore_eos=True)
        self.chat = OpenAIClient(TargetOptions(base_url=url, endpoint="chat", ignore_eos=True), ignore_eos=True)
        self._url = url
        self._pid = running.process.pid
        self.cpu_shares: list[tuple[float, float]] = []
        """For each run: of a core, what the API process took, and this one."""

    async def run(self, client: OpenAIClient, samples: list[Sample]) -> Times:
        payloads = [client.payload(sample) for sample in samples]
        firsts: list[float] = []
        own, api = time.process_time(), cpu_seconds(self._pid)
        begin = clock()

        async def send(index: int) -> None:
            record = await client.send(payloads[index], index, None, begin)
            assert record.error is None, record.message
            assert record.first_token is not None
            firsts.append(record.first_token)

        await asyncio.gather(*map(send, range(len(samples))))
        seconds = clock() - begin
        self.cpu_shares.append(((cpu_seconds(self._pid) - api) / seconds, (time.process_time() - own) / seconds))
        return seconds, min(firsts)

    async def tokenize(self, messages: list[dict[str, str]]) -> list[int]:
        async with aiohttp.ClientSession() as session:
            answer = await session.post(f"{self._url}/tokenize", json={"messages": messages})
            tokens: list[int] = (await answer.json())["tokens"]
        return tokens


def random_ids(draw: random.Random, count: int) -> list[list[int]]:
    return [[draw.randrange(100, 40_000) for _ in range(INPUT)] for _ in range(count)]


def conversation(draw: random.Random) -> list[dict[str, str]]:
    numbers = ", ".join(str(draw.randrange(1000)) for _ in range(8))
    return [{"role": "user", "content": f"Which of these numbers are prime: {numbers}?"}]


class Comparison:
    """Turns of the engine and of the server on the same prompts."""

    def __init__(self, engine: Engine, server: Server) -> None:
        self._engine = engine
        self._server = server
        self._draw = random.Random(0)
        self._engine_first = False

    async def sixteen_streams(self) -> tuple[Times, Times]:
        prompts = random_ids(self._draw, STREAMS)
        samples = [Sample(OUTPUT, INPUT, token_ids=ids) for ids in prompts]
        return await self._both(prompts, OUTPUT, self._server.ids, samples)

    async def one_as_ids(self) -> tuple[Times, Times]:
        prompts = random_ids(self._draw, 1)
        sample = Sample(FIRST_OUTPUT, INPUT, token_ids=prompts[0])
        return await self._both(prompts, FIRST_OUTPUT, self._server.ids, [sample])

    async def one_as_chat(self) -> tuple[Times, Times]:
        messages = conversation(self._draw)
        ids = await self._server.tokenize(messages)
        sample = Sample(FIRST_OUTPUT, len(ids), messages=messages)
        return await self._both([ids], FIRST_OUTPUT, self._server.chat, [sample])

    async def _both(
        self, prompts: list[list[int]], outputs: int, client: OpenAIClient, samples: list[Sample]
    ) -> tuple[Times, Times]:
        self._engine_first = not self._engine_first
        if self._engine_first:
            alone = self._engine.run(prompts, outputs)
            return alone, await self._server.run(client, samples)
        served = await self._server.run(client, samples)
        return self._engine.run(prompts, outputs), served


async def turns_for(seconds: float, turn: Turn) -> list[tuple[Times, Times]]:
    """As many turns as begin within the time, after one that only warms up."""
    await turn()
    end = clock() + seconds
    found = []
    while clock() < end:
        found.append(await turn())
    return found


def throughput(turns: list[tuple[Times, Times]]) -> dict[str, Any]:
    rates = {side: [STREAMS * OUTPUT / turn[index][0] for turn in turns] for index, side in enumerate(SIDES)}
    lost = [1 - served / alone for alone, served in zip(*rates.values(), strict=True)]
    return {"tokens_per_s": medians(rates), "lost": spread(lost), "tokens_per_s_all": rates}


def first_token(turns: list[tuple[Times, Times]]) -> dict[str, Any]:
    times = {side: [1000 * turn[index][1] for turn in turns] for index, side in enumerate(SIDES)}
    added = [served - alone for alone, served in zip(*times.values(), strict=True)]
    return {"ttft_ms": medians(times), "added_ms": spread(added), "ttft_ms_all": times}


def medians(values: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(found) for name, found in values.items()}


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "p25": low, "p75": high, "count": len(values)}


async def compare(running: Running, seconds: float) -> dict[str, Any]:
    engine, server = Engine(), Server(running)
    comparison = Comparison(engine, server)
    try:
        async with server.ids, server.chat:
            await server.ids.find_model()
            await server.chat.find_model()
            ids = await turns_for(0.15 * seconds, comparison.one_as_ids)
            print(f"first token, token ids: {len(ids)} turns")
            chat = await turns_for(0.15 * seconds, comparison.one_as_chat)
            print(f"first token, conversation: {len(chat)} turns")
            streams = await turns_for(0.7 * seconds, comparison.sixteen_streams)
            print(f"throughput: {len(streams)} turns")
            shares = server.cpu_shares[-len(streams) :]
    finally:
        engine.stop()
    cores = {"api": [api for api, _ in shares], "client": [own for _, own in shares]}
    return {
        "throughput": throughput(streams) | {"cores": medians(cores)},
        "first_token_ids": first_token(ids),
        "first_token_chat": first_token(chat),
        "limits": LIMITS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=85.0, help="to measure for, without the start")
    args = parser.parse_args()
    with running("quire", DEFAULT_FOLDER, MODEL) as server:
        results = uvloop.run(compare(server, args.seconds))
    show(results)
    print(f"written to {write_results('server_overhead', environment('quire', 'torch'), results)}")


def show(results: dict[str, Any]) -> None:
    table = Table("", "engine", "server", "added", "limit", title="What the server adds to the engine")
    rate, lost = results["throughput"]["tokens_per_s"], results["throughput"]["lost"]
    share = f"{lost['median']:.1%} ({lost['p25']:.1%} to {lost['p75']:.1%})"
    table.add_row(f"tokens/s, {STREAMS} streams", f"{rate['engine']:.1f}", f"{rate['server']:.1f}", share, "8 %")
    for kind, name in (("first_token_ids", "token ids"), ("first_token_chat", "conversation")):
        times, added = results[kind]["ttft_ms"], results[kind]["added_ms"]
        share = f"{added['median']:.1f} ({added['p25']:.1f} to {added['p75']:.1f})"
        table.add_row(f"TTFT of one, ms, {name}", f"{times['engine']:.1f}", f"{times['server']:.1f}", share, "10")
    Console().print(table)
    cores = results["throughput"]["cores"]
    print(f"meanwhile the API process took {cores['api']:.1%} of a core, the client {cores['client']:.1%}")


if __name__ == "__main__":
    main()
