"""What can go wrong around a server, with real processes and sockets on a tiny model.

After each fault all KV blocks are free, nobody's process is left behind, and the next request is served.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import string
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase

from tests.e2e.serving import Running, assert_idle_and_serving, events_of, eventually, launch, scrape, start
from tests.e2e.tiny import make_model
from tests.e2e.tiny_tokenizer import write_tokenizer
from tests.engine.processes import Watch
from tests.server.helpers import make_app

# What it forbids is refused before an engine sees it: tests/server/test_openapi.py sends that.
schema = schemathesis.openapi.from_dict(make_app().openapi())
schema.config.generation.update(modes=[schemathesis.GenerationMode.POSITIVE])

LONG = 4000
# It is part of every event, which makes long streams longer than the system's socket buffers.
NAME = "tiny" * 300
FLAGS = (
    *("--kv-cache-memory", "64MiB", "--max-num-seqs", "64", "--max-body-bytes", "64KiB"),
    *("--served-model-name", NAME),
)
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(
        tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=1, vocab_size=98, max_position_embeddings=4096
    )
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    running = start(str(model), *FLAGS)
    yield running
    assert running.stop() == 0


@pytest.fixture
async def client(server: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with connect(server) as session:
        yield session


def connect(server: Running) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=60, limits=httpx.Limits(max_connections=None))


def endless(index: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": f"number {index}", "max_tokens": LONG, "ignore_eos": True, **fields}


def mixed(index: int) -> dict[str, Any]:
    """Sampled and greedy, with log-probabilities, several completions, stop strings, grammars, token ids."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"n": 2},
        {"logprobs": 2, "frequency_penalty": 0.5},
        {"stop": ["zq", "Qx", "a7"], "include_stop_str_in_output": True},
        {"structured_outputs": {"regex": "[a-z ]{600,}"}},
        {"return_token_ids": True, "min_p": 0.01},
    ]
    fields = {"prompt": f"number {index} " * (1 + index % 9), "seed": index, "ignore_eos": True, "max_tokens": 600}
    return fields | kinds[index % len(kinds)]


async def answers_to(client: httpx.AsyncClient, begun: set[int]) -> list[Any]:
    """To 32 mixed streams and 4 requests that are not streamed, what their clients put together."""

    async def stream(index: int) -> Any:
        text = ""
        body = mixed(index) | {"stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", COMPLETIONS, json=body) as answer:
            assert answer.status_code == 200
            async for part in answer.aiter_text():
                begun.add(index)
                text += part
        events = events_of(text)
        assert all("error" not in event for event in events)
        choices: dict[int, list[Any]] = {}
        for choice in (choice for event in events for choice in event["choices"]):
            fold = choices.setdefault(choice["index"], ["", [], [], None, None])
            logprobs = choice["logprobs"] or {"token_logprobs": [], "top_logprobs": []}
            fold[0] += choice["text"]
            fold[1] += choice.get("token_ids") or []
            fold[2] += zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
            fold[3:] = choice["finish_reason"], choice.get("stop_reason")
        return choices, events[-1]["usage"]["prompt_tokens"], events[-1]["usage"]["completion_tokens"]

    async def whole(index: int) -> Any:
        answer = await client.post(COMPLETIONS, json=mixed(index))
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"], answer.json()["usage"]["completion_tokens"]

    return await asyncio.gather(*map(stream, range(32)), *map(whole, range(32, 36)))


async def test_kills_of_the_engine_under_32_mixed_streams_change_nothing(
    server: Running, client: httpx.AsyncClient
) -> None:
    expected = await answers_to(client, set())
    before = await scrape(client)
    begun: set[int] = set()
    answers = asyncio.create_task(answers_to(client, begun))
    for num_kills in range(1, 3):

        async def runs(num_kills: int = num_kills) -> bool:
            seen = await scrape(client)
            restarts = seen.get("engine_restarts_total") - before.get("engine_restarts_total")
            return restarts == num_kills - 1 and seen.get("num_requests_running") >= 30 and len(begun) == 32

        await eventually(runs)
        killed = Watch(server.last_engine_pid())
        os.kill(server.last_engine_pid(), signal.SIGKILL)
        killed.wait()

    async def restarting() -> bool:
        health = await client.get("/health")
        return health.status_code == 503 and health.json()["status"] == "restarting"

    await eventually(restarting)
    late = await client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 3})  # it waits for the next engine
    assert late.status_code == 200
    assert await answers == expected
    after = await scrape(client)
    assert after.get("requests_resumed_total") - before.get("requests_resumed_total") >= 60
    await assert_idle_and_serving(client)


async def test_500_requests_of_which_a_third_disconnect_at_random_moments(
    server: Running, client: httpx.AsyncClient
) -> None:
    choose = random.Random(0)
    slots = asyncio.Semaphore(48)
    before = await scrape(client)
    num_tokens = num_completions = 0

    async def visit(index: int) -> None:
        nonlocal num_tokens, num_completions
        leaves = index % 3 == 0
        tokens = choose.randint(1, 40)
        body = json.dumps(
            endless(index, max_tokens=LONG if leaves else tokens, stream=index % 2 == 0, n=1 + index % 2)
        )
        async with slots:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request_bytes(body.encode()))
            if leaves:
                await leave(reader, writer, choose.random())
                return
            answer = await reader.read()
            writer.close()
        assert answer.startswith(b"HTTP/1.1 200 OK")
        if index % 2 == 0:
            assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        num_completions += 1 + index % 2
        num_tokens += tokens * (1 + index % 2)

    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, moment: float) -> None:
        """At once, with the request half sent or just sent, or in the middle of the answer."""
        if moment > 0.3:
            with suppress(TimeoutError):  # nothing is sent before the answer is complete, if it is not streamed
                await asyncio.wait_for(reader.readexactly(int(5000 * moment)), moment)
        writer.transport.abort()

    await asyncio.gather(*(visit(index) for index in range(500)))
    await assert_idle_and_serving(client)
    after = await scrape(client)

    def grown(name: str, **labels: str) -> float:
        return after.get(name, **labels) - before.samples.get((name, tuple(labels.items())), 0.0)

    # Those that left were stopped long before their end, those that stayed got all they asked for.
    assert grown("request_success_total", finished_reason="length") == num_completions + 1
    assert num_completions == 333 + 167
    assert num_tokens <= grown("generation_tokens_total") < num_tokens + 167 * LONG / 4


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"


def request_bytes(body: bytes) -> bytes:
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def test_a_client_that_reads_one_byte_a_second(server: Running, client: httpx.AsyncClient) -> None:
    """It costs its text and no more, and delays nobody: the engine finishes long before it has read anything."""
    tokens = 500
    fields = {"prompt": "slow", "max_tokens": tokens, "ignore_eos": True, "n": 8, "seed": 1}
    whole = (await client.post(COMPLETIONS, json=fields)).json()
    resident = resident_bytes(server.process.pid)
    gone = threading.Event()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(request_bytes(json.dumps(fields | {"stream": True}).encode()))
        received = connection.recv(1)

        def read_slowly() -> None:
            nonlocal received
            while not gone.wait(1.0):
                received += connection.recv(1)

        reader = threading.Thread(target=read_slowly)
        reader.start()
        await assert_idle_and_serving(client)  # the slow one's requests have ended too
        grown = resident_bytes(server.process.pid) - resident
        gone.set()
        reader.join(timeout=30)
        assert len(received) < 100
        received += await asyncio.to_thread(read_to_end, connection)
    assert grown < 16 << 20
    events = events_of(dechunked(received.partition(b"\r\n\r\n")[2]).decode())
    texts = [""] * 8
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert len(events) < 8 * tokens  # what waited was merged


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def read_to_end(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def dechunked(body: bytes) -> bytes:
    parts = []
    position = 0
    while True:
        end = body.index(b"\r\n", position)
        length = int(body[position:end], 16)
        if length == 0:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + length])
        position = end + 4 + length


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
BROKEN = {
    "no JSON": (request_bytes(b"{"), 400),
    "no UTF-8": (request_bytes(b'{"prompt": "\xff"}'), 400),
    "no object": (request_bytes(b"[]"), 400),
    "nested too deep": (request_bytes(b'{"prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"), 400),
    "a huge number": (request_bytes(b'{"prompt": "x", "max_tokens": 1' + b"0" * 5000 + b"}"), 400),
    "an infinite number": (request_bytes(b'{"prompt": "x", "temperature": 1e999}'), 400),
    "half a character": (request_bytes(b'{"prompt": "\\ud800", "max_tokens": 1}'), 400),
    "too large": (request_bytes(b'{"prompt": "' + b"x" * 100_000 + b'"}'), 413),
    "too large in chunks": (CHUNKED + (b"8000\r\n" + b"x" * 0x8000 + b"\r\n") * 3, 413),
    "a prompt over the context": (request_bytes(b'{"prompt": "' + b"x" * 5000 + b'"}'), 400),
    "n too large": (request_bytes(b'{"prompt": "x", "n": 65}'), 400),
    "no HTTP": (b"\x16\x03\x01 hello\r\n\r\n", 400),
    "no such method": (b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_malformed_and_oversized_bodies(name: str, server: Running) -> None:
    request, status = BROKEN[name]
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request)
    line = await asyncio.wait_for(reader.readline(), 30)
    writer.transport.abort()  # closing would wait for what nobody reads
    assert int(line.split()[1]) == status


@schema.parametrize()
@hypothesis.settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_no_request_that_the_schema_allows_hurts_the_engine(case: schemathesis.Case, server: Running) -> None:
    if isinstance(case.body, dict):  # so that what is valid does not run to the end of the context
        for name in ("max_tokens", "max_completion_tokens"):
            if isinstance(case.body.get(name), int | None):
                case.body[name] = 4
    response = case.call(base_url=server.url, timeout=30)
    assert response.status_code < 500, response.text


async def test_a_request_that_never_ends_holds_nothing_up(server: Running, client: httpx.AsyncClient) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request_bytes(b"x" * 1000)[:-500])
    await assert_idle_and_serving(client)
    writer.transport.abort()
    await assert_idle_and_serving(client)


async def test_streams_equal_bodies_for_random_prompts_and_stop_strings(client: httpx.AsyncClient) -> None:
    draw = random.Random(1)
    stopped = 0

    async def compare(seed: int) -> None:
        nonlocal stopped
        prompt = "".join(draw.choices(string.printable[:94], k=draw.randint(1, 30)))
        stop = ["".join(draw.choices(string.ascii_letters, k=draw.randint(1, 2))) for _ in range(4)]
        fields = {"prompt": prompt, "seed": seed, "max_tokens": 80, "stop": stop, "n": draw.randint(1, 2)}
        fields |= {"temperature": draw.choice([0.0, 0.7, 1.5]), "include_stop_str_in_output": draw.random() < 0.5}
        whole, streamed = await asyncio.gather(
            client.post(COMPLETIONS, json=fields), client.post(COMPLETIONS, json=fields | {"stream": True})
        )
        choices = whole.json()["choices"]
        texts, ends = [""] * len(choices), [(None, None)] * len(choices)
        for event in events_of(streamed.text):
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
                ends[choice["index"]] = (choice["finish_reason"], choice.get("stop_reason"))
        assert texts == [choice["text"] for choice in choices]
        assert ends == [(choice["finish_reason"], choice["stop_reason"]) for choice in choices]
        stopped += sum(isinstance(choice["stop_reason"], str) for choice in choices)

    await asyncio.gather(*(compare(seed) for seed in range(40)))
    assert stopped > 10


async def test_metrics_reconcile_with_the_clients_own_counts(client: httpx.AsyncClient) -> None:
    await assert_idle_and_serving(client)
    before = await scrape(client)
    counts: Counter[str] = Counter()

    async def ask(index: int) -> None:
        fields = {"prompt": f"count {index % 7} " * 5, "max_tokens": 1 + index % 9, "n": 1 + index % 3, "seed": index}
        if index % 2:
            answer = (await client.post(COMPLETIONS, json=fields)).json()
            usage, choices = answer["usage"], answer["choices"]
        else:
            options = {"stream": True, "stream_options": {"include_usage": True}}
            events = events_of((await client.post(COMPLETIONS, json=fields | options)).text)
            usage = events[-1]["usage"]
            choices = [choice for event in events for choice in event["choices"] if choice["finish_reason"]]
        counts["requests"] += 1
        counts.update({name: usage[name] for name in ("prompt_tokens", "completion_tokens")})
        counts["cached"] += usage["prompt_tokens_details"]["cached_tokens"]
        counts.update(choice["finish_reason"] for choice in choices)

    await asyncio.gather(*(ask(index) for index in range(60)))
    after = await scrape(client)

    def grown(name: str, **labels: str) -> float:
        key = (name, tuple(sorted(labels.items())))
        return after.samples.get(key, 0.0) - before.samples.get(key, 0.0)

    assert counts["requests"] == 60
    assert grown("prompt_tokens_total") == counts["prompt_tokens"]
    assert grown("prompt_tokens_cached_total") == counts["cached"]
    assert grown("generation_tokens_total") == counts["completion_tokens"]
    assert grown("http_requests_total", method="POST", route=COMPLETIONS, status="200") == 60
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert grown(f"{name}_count") == 60
    assert grown("request_prompt_tokens_sum") == counts["prompt_tokens"]
    assert grown("request_generation_tokens_sum") == counts["completion_tokens"]
    for reason in ("stop", "length"):
        assert grown("request_success_total", finished_reason=reason) == counts[reason]


def test_only_the_engine_process_has_torch(server: Running) -> None:
    has_torch = [
        "libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in (server.process.pid, server.last_engine_pid())
    ]
    assert has_torch == [False, True]


@pytest.mark.nightly
async def test_idle_costs_less_than_a_percent_of_a_core(server: Running, client: httpx.AsyncClient) -> None:
    await assert_idle_and_serving(client)
    pids = (server.process.pid, server.last_engine_pid())
    before = sum(map(cpu_seconds, pids))
    await asyncio.sleep(20)
    assert sum(map(cpu_seconds, pids)) - before < 0.01 * 20


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_two_servers_on_one_machine_and_the_drain_of_one(
    model: Path, server: Running, client: httpx.AsyncClient
) -> None:
    taken = launch(str(model), "--port", str(server.port))
    other = start(str(model), *FLAGS)
    assert taken.wait() != 0
    assert f"port {server.port}" in taken.log[-1]
    assert "--port" in taken.log[-1]
    engine = Watch(other.engine_pid())
    async with connect(other) as second:
        fields = {"prompt": "same", "seed": 3, "max_tokens": 20}
        answers = await asyncio.gather(*(session.post(COMPLETIONS, json=fields) for session in (client, second)))
        assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
        async with second.stream("POST", COMPLETIONS, json=endless(0, max_tokens=800, stream=True)) as answer:
            parts = answer.aiter_text()
            text = await anext(parts)
            other.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(other.wait_line, "SIGTERM: finishing")
            refused = await second.post(COMPLETIONS, json={"prompt": "x"})
            assert refused.status_code == 503
            async for part in parts:
                text += part
    assert events_of(text)[-1]["choices"][0]["finish_reason"] == "length"
    assert await asyncio.to_thread(other.wait) == 0
    engine.wait()
    await assert_idle_and_serving(client)
