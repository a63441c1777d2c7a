"""A hundred thousand requests of all kinds, a tenth of them hostile: what a server answers, and what it keeps.

    python benchmarks/soak.py [--scripted 80000] [--real 20000] [--concurrency 24]

The first part goes to `quire serve` over an engine that says scripted tokens (scripted_engine.py), where HTTP, text,
scheduling and grammars are all there is; the second to `quire serve` on the default model, with few tokens each.
It passes if no answer is a 5xx but a 503 with Retry-After, if every ordinary request is answered as asked, if no
traceback is in the log and no engine was restarted, and if the resident memory of both processes at the end is at
most 2 % above that after three eighths of the part (30,000 requests of 80,000). Memory moves by 1 % with what runs at
the moment, so both are medians of a minute. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from processes import cpu_seconds, resident_bytes
from report import environment, write_results
from rich.console import Console
from rich.table import Table
from soak_requests import MESSAGES, RESPONSES, Mix, Request, Sizes

GROWTH_LIMIT = 0.02
MARK = 3 / 8  # of a part's requests, after which memory is measured for the comparison
START_LIMIT, ANSWER_LIMIT, RAW_LIMIT = 120.0, 120.0, 2.0  # seconds
SAMPLE_EVERY = 5.0  # seconds
TYPICAL = 12  # samples, of which the median counts
MOST_PROBLEMS = 50
# Most of the default model's prompts are known already, and its KV cache is one that the first requests fill.
PARTS: dict[str, tuple[Sizes, list[str]]] = {
    "scripted": (Sizes(prompts=2000, tokens=12, long_tokens=300, context=2048), []),
    "real": (Sizes(prompts=100, tokens=3, long_tokens=48, context=2048), ["--kv-cache-memory", "128MiB"]),
}
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FLAGS = ["--port", "0", "--tool-call-parser", "hermes", "--chat-template", TEMPLATE, "--max-model-len", "2048"]


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    log: Path
    port: int
    engine: int

    def resident(self) -> dict[str, int]:
        return {"API": resident_bytes(self.process.pid), "engine": resident_bytes(self.engine)}

    def cpu(self) -> dict[str, float]:
        return {"API": cpu_seconds(self.process.pid), "engine": cpu_seconds(self.engine)}


@contextmanager
def serving(part: str, folder: Path) -> Iterator[Server]:
    scripted = [str(Path(__file__).parent / "scripted_engine.py")]
    program = scripted if part == "scripted" else ["-m", "quire", "serve", "--no-spare-engine"]
    log = folder / f"{part}.log"
    with log.open("wb") as file:
        command = [sys.executable, *program, *FLAGS, *PARTS[part][1]]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        engine = int(_wait_line(process, log, r"engine process (\d+) is ready"))
        port = int(_wait_line(process, log, r"serving on http://\S+:(\d+), ready"))
        yield Server(process, log, port, engine)
    finally:
        process.terminate()
        process.wait()


def _wait_line(process: subprocess.Popen[bytes], log: Path, pattern: str) -> str:
    begin = time.monotonic()
    while time.monotonic() - begin < START_LIMIT and process.poll() is None:
        if found := re.search(pattern, log.read_text(errors="replace")):
            return found[1]
        time.sleep(0.1)
    raise SystemExit(f"the server did not say {pattern!r}; its log:\n{log.read_text(errors='replace')[-4000:]}")


class Connection:
    """One client's connection, kept open between requests."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, data: bytes) -> asyncio.StreamReader:
        if self._reader is None or self._writer is None or self._reader.at_eof():
            self.close()
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22)
        self._writer.write(data)
        await self._writer.drain()
        return self._reader

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


def encode(request: Request) -> bytes:
    if request.raw is not None:
        return request.raw
    headers = {"host": "soak", **request.headers, "content-length": str(len(request.body))}
    if request.method == "GET":
        del headers["content-length"]
    lines = [f"{request.method} {request.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + (b"" if request.method == "GET" else request.body)


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = b""
    if headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    elif "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    return Answer(int(first.split()[1]), headers, body)


def problem_of(request: Request, answer: Answer) -> str | None:
    """What is wrong with an answer, if anything."""
    if answer.status == 503 and "retry-after" in answer.headers:
        return None
    if answer.status >= 500:
        return f"status {answer.status}: {answer.body[:300]!r}"
    if request.hostile:
        return None
    if answer.status != 200:
        return f"status {answer.status} for an ordinary request: {answer.body[:300]!r}"
    return _stream_problem(request, answer.body) if request.streams else _body_problem(request, answer.body)


def _body_problem(request: Request, body: bytes) -> str | None:
    if request.kind == "look":
        return None
    found = json.loads(body)
    return f"an error in a body: {body[:300]!r}" if found.get("error") else None


def _stream_problem(request: Request, body: bytes) -> str | None:
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    last = events.pop() if events and events[-1] == b"[DONE]" else b""
    contents = [json.loads(event) for event in events]
    if any(content.get("error") for content in contents):
        return f"an error in a stream: {body[-300:]!r}"
    if request.path == RESPONSES:
        ended = bool(contents) and contents[-1]["type"] in ("response.completed", "response.incomplete")
    elif request.path == MESSAGES:
        ended = bool(contents) and contents[-1]["type"] == "message_stop"
    else:
        ended = last == b"[DONE]"
    return None if ended else f"a stream without its end: {body[-300:]!r}"


@dataclass
class Tally:
    statuses: dict[str, Counter[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    num_problems: int = 0
    num_done: int = 0

    def count(self, request: Request, status: str, problem: str | None = None) -> None:
        self.num_done += 1
        self.statuses.setdefault(request.kind, Counter())[status] += 1
        if problem is not None:
            self.num_problems += 1
            if len(self.problems) < MOST_PROBLEMS:
                self.problems.append(f"{request.kind} {request.path}: {problem}; sent {request.body[:300]!r}")


class Client:
    """Sends one request after another."""

    def __init__(self, port: int, tally: Tally) -> None:
        self._port = port
        self._tally = tally
        self._kept = Connection(port)

    async def send(self, request: Request) -> None:
        try:
            if request.raw is not None:
                await self._send_raw(request)
            elif request.manner == "reads":
                await self._ask(request)
            else:
                await self._misbehave(request)
        except (TimeoutError, OSError, EOFError, ValueError) as error:
            self._kept.close()
            refused = request.hostile and not isinstance(error, TimeoutError)  # closed without a word: no 5xx
            status, problem = ("closed", None) if refused else (type(error).__name__, repr(error))
            self._tally.count(request, status, problem)

    async def _ask(self, request: Request) -> None:
        async with asyncio.timeout(ANSWER_LIMIT):
            answer = await read_answer(await self._kept.send(encode(request)))
        if answer.headers.get("connection") == "close" or answer.status == 500:
            self._kept.close()
        self._tally.count(request, str(answer.status), problem_of(request, answer))

    async def _send_raw(self, request: Request) -> None:
        """Not all of these can be answered: then the client leaves after a while."""
        connection = Connection(self._port)
        try:
            async with asyncio.timeout(RAW_LIMIT):
                answer = await read_answer(await connection.send(encode(request)))
            self._tally.count(request, str(answer.status), problem_of(request, answer))
        except TimeoutError:
            self._tally.count(request, "left")
        finally:
            connection.close()

    async def _misbehave(self, request: Request) -> None:
        connection, data = Connection(self._port), encode(request)
        try:
            async with asyncio.timeout(ANSWER_LIMIT):
                if request.manner == "half-sends":
                    await connection.send(data[: len(data) - len(request.body) // 2])
                    await asyncio.sleep(0.2)
                elif request.manner == "dawdles":
                    reader = await connection.send(data)
                    for _ in range(20):
                        await reader.read(1)
                        await asyncio.sleep(0.05)
                elif request.streams:
                    await (await connection.send(data)).readuntil(b"data: ")
                else:
                    await connection.send(data)
                    await asyncio.sleep(0.01)
            self._tally.count(request, "left")
        finally:
            connection.close()

    def close(self) -> None:
        self._kept.close()


class Part:
    """The requests of one server."""

    def __init__(self, name: str, server: Server, count: int, concurrency: int, seed: int) -> None:
        self._server = server
        self._count = count
        self._concurrency = concurrency
        self._mix = Mix(PARTS[name][0], seed)
        self._name = name
        self._begin = time.monotonic()
        self.tally = Tally()
        self.samples: list[dict[str, float]] = []

    async def run(self) -> dict[str, Any]:
        begin, cpu = time.monotonic(), self._server.cpu()
        sampling = asyncio.create_task(self._sample())
        await self._send(round(self._count * MARK))
        early = self._typical()
        await self._send(self._count - self.tally.num_done)
        seconds = time.monotonic() - begin
        late = self._typical()
        sampling.cancel()
        growth = {name: late[name] / early[name] - 1 for name in late}
        return {
            "requests": self.tally.num_done,
            "seconds": seconds,
            "requests_per_s": self.tally.num_done / seconds,
            "cpu_seconds": {name: used - cpu[name] for name, used in self._server.cpu().items()},
            "resident_at_mark": early,
            "resident_at_end": late,
            "growth": growth,
            "statuses": {kind: dict(found) for kind, found in sorted(self.tally.statuses.items())},
            "num_problems": self.tally.num_problems,
            "problems": self.tally.problems,
            "samples": self.samples,
        }

    async def _send(self, count: int) -> None:
        """That many more, by clients that each send one after the other."""
        left = iter(range(count))

        async def work() -> None:
            client = Client(self._server.port, self.tally)
            for _ in left:
                await client.send(self._mix.next())
            client.close()

        await asyncio.gather(*(work() for _ in range(self._concurrency)))

    def _typical(self) -> dict[str, int]:
        recent = [self._server.resident(), *self.samples[-TYPICAL:]]
        return {name: int(statistics.median(sample[name] for sample in recent)) for name in recent[0]}

    async def _sample(self) -> None:
        while True:
            done, resident = self.tally.num_done, self._server.resident()
            at = time.monotonic() - self._begin
            self.samples.append({"seconds": round(at, 1), "requests": done, **resident})
            memory = ", ".join(f"{name} {value >> 20} MiB" for name, value in resident.items())
            wrong = self.tally.num_problems
            print(f"{self._name}: {done} requests in {at:.0f} s, {wrong} problems, {memory}", flush=True)
            await asyncio.sleep(SAMPLE_EVERY)


def log_problems(log: Path) -> list[str]:
    """Restarts of the engine, and the end of each traceback."""
    text = log.read_text(errors="replace")
    restarts = re.findall(r"^.*restart \d+ in .*$", text, flags=re.M)
    tracebacks = re.findall(r"^Traceback \(most recent.*\n(?:^ .*\n|^\n)*^\S.*$", text, flags=re.M)
    return restarts + ["\n".join(found.splitlines()[-7:]) for found in tracebacks]


def verdict(results: dict[str, Any]) -> list[str]:
    """Why the soak does not pass; nothing, if it does."""
    reasons = []
    for name, part in results.items():
        if part["num_problems"]:
            reasons.append(f"{name}: {part['num_problems']} answers are wrong")
        if part["num_log_problems"]:
            reasons.append(f"{name}: {part['num_log_problems']} tracebacks or restarts in the log")
        for process, growth in part["growth"].items():
            if growth > GROWTH_LIMIT:
                reasons.append(f"{name}: the {process} process grew by {growth:.1%}")
    return reasons


def show(results: dict[str, Any]) -> None:
    table = Table("", "requests", "seconds", "requests/s", "wrong", "API, MiB", "engine, MiB", title="Soak")
    for name, part in results.items():
        memory = [
            f"{part['resident_at_mark'][p] >> 20} -> {part['resident_at_end'][p] >> 20} ({part['growth'][p]:+.1%})"
            for p in ("API", "engine")
        ]
        rate = f"{part['requests_per_s']:.0f}"
        table.add_row(name, str(part["requests"]), f"{part['seconds']:.0f}", rate, str(part["num_problems"]), *memory)
    Console().print(table)
    for name, part in results.items():
        for problem in part["problems"][:10] + part["log_problems"][:3]:
            print(f"{name}: {problem}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scripted", type=int, default=80_000, help="requests on the scripted engine")
    parser.add_argument("--real", type=int, default=20_000, help="requests on the default model")
    parser.add_argument("--concurrency", type=int, default=24, help="clients at once")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that the server is stopped too
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, count in (("scripted", args.scripted), ("real", args.real)):
            if count:
                with serving(name, Path(folder)) as server:
                    part = Part(name, server, count, args.concurrency, args.seed)
                    results[name] = uvloop.run(part.run())
                found = log_problems(server.log)
                results[name] |= {"num_log_problems": len(found), "log_problems": found[:MOST_PROBLEMS]}
    show(results)
    reasons = verdict(results)
    report = {"concurrency": args.concurrency, "growth_limit": GROWTH_LIMIT, "failed": reasons, "parts": results}
    print(f"written to {write_results('soak', environment('quire', 'torch', 'uvicorn'), report)}")
    print("\n".join(f"FAILED: {reason}" for reason in reasons) or "passed")
    return 1 if reasons else 0


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
