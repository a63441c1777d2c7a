"""Streams over an engine that is killed again and again: what clients see of it.

    python benchmarks/kills.py --kills 200 [--standby --life 8] [--streams 32] [--model smollm2] [--minutes 40]

`quire serve` answers mixed requests (greedy and sampled, several completions, log-probabilities, grammars, stop
strings, tools, Responses and Messages), `--streams` at a time, first undisturbed and then while its engine gets
SIGKILL again and again, each time when the one before it has given tokens. Counted are errors that clients see and
answers that differ; measured is the pause from a kill to the next token of any stream.
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
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from report import environment, write_results
from rich.console import Console
from rich.table import Table

TALE = "Once upon a time, in a town by the sea,"
TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


def request(index: int, tokens: int) -> tuple[str, dict[str, Any]]:
    """The path and the body of mixed request `index`."""
    talk = [{"role": "user", "content": f"Tell me tale number {index} of the sea."}]
    long = {"max_tokens": tokens, "ignore_eos": True, "seed": index}
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("completions", {"prompt": f"{TALE} {index}", "temperature": 0.0, **long}),
        ("completions", {"prompt": f"{TALE} {index}", "n": 2, "logprobs": 2, **long}),
        ("completions", {"prompt": f"{TALE} {index}", "structured_outputs": {"regex": "[a-z ]{900,}"}, **long}),
        ("chat/completions", {"messages": talk, "logprobs": True, "top_logprobs": 2, **long}),
        ("chat/completions", {"messages": talk, "stop": ["7.", "very very"], **long}),
        (
            "chat/completions",
            {"messages": talk, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}
            | {"max_tokens": tokens, "seed": index},
        ),
        (
            "responses",
            {"input": talk[0]["content"], "max_output_tokens": tokens, "ignore_eos": True, "seed": index}
            | {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "return_tokens_as_token_ids": True},
        ),
        ("messages", {"messages": talk, **long}),
    ]
    path, body = kinds[index % len(kinds)]
    more = {"stream_options": {"include_usage": True}, "return_token_ids": True} if "completions" in path else {}
    return f"/v1/{path}", body | {"stream": True} | more


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str = ""
    pid: int = 0
    log: list[str] = field(default_factory=list)
    ready: threading.Event = field(default_factory=threading.Event)

    def read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"engine process (\d+) is ready", line):
                self.pid = int(found[1])
            if found := re.search(r"serving on (http://\S+), ready", line):
                self.url = found[1]
                self.ready.set()
        self.ready.set()


@contextmanager
def serving(model: str, *flags: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "quire", "serve", model, "--port", "0", *flags]
    server = Server(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    threading.Thread(target=server.read, daemon=True).start()
    server.ready.wait()
    if not server.url:
        raise SystemExit("".join(server.log))
    try:
        yield server
    finally:
        server.process.terminate()
        server.process.wait()


@dataclass
class Clients:
    """Ask the requests, `streams` at a time."""

    url: str
    num_requests: int
    streams: int
    tokens: int
    answers: dict[int, Any] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    num_kills: int = 0
    most_deaths: int = 0
    """Of engines, within one stream."""
    last_news: float = 0.0
    """When a stream last had something other than a keep-alive."""

    async def run(self) -> None:
        slots = asyncio.Semaphore(self.streams)
        async with httpx.AsyncClient(
            base_url=self.url, timeout=600, limits=httpx.Limits(max_connections=None)
        ) as http:
            await asyncio.gather(*(self._ask(http, slots, index) for index in range(self.num_requests)))

    async def _ask(self, http: httpx.AsyncClient, slots: asyncio.Semaphore, index: int) -> None:
        path, body = request(index, self.tokens)
        events: list[Any] = []
        before = 0
        async with slots, http.stream("POST", path, json=body) as answer:
            before = self.num_kills
            if answer.status_code != 200:
                self.errors.append(f"{index}: {answer.status_code} {(await answer.aread()).decode()}")
                return
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line[6:]))
                    if events[-1].get("type") != "ping":
                        self.last_news = time.monotonic()
        self.most_deaths = max(self.most_deaths, self.num_kills - before)
        if failed := next(
            (event for event in events if event.get("error") or "failed" in event.get("type", "")), None
        ):
            self.errors.append(f"{index}: {failed}")
        self.answers[index] = put_together(events)


def put_together(events: list[Any]) -> Any:
    """What a client has in the end: texts, calls, token ids, log-probabilities, finish reasons and token counts."""
    if events[0].get("type") == "response.created":
        response = events[-1]["response"]
        parts = [part for item in response["output"] for part in item.get("content") or ()]
        calls = [(item.get("name"), item.get("arguments")) for item in response["output"]]
        texts = [(part["text"], part["logprobs"]) for part in parts]  # whose tokens are named by their ids
        return texts, calls, response["status"], response["usage"]["output_tokens"]
    if events[0].get("type") == "message_start":
        deltas = [event["delta"] for event in events if "delta" in event]
        text = "".join(delta.get("text") or delta.get("partial_json") or "" for delta in deltas)
        names = [event["content_block"].get("name") for event in events if "content_block" in event]
        return text, names, deltas[-1]["stop_reason"], events[-2]["usage"]["output_tokens"]
    choices: dict[int, Choice] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        choices.setdefault(choice["index"], Choice()).take(choice)
    return choices, events[-1]["usage"]["completion_tokens"]


@dataclass
class Choice:
    """One completion, put together of its chunks."""

    text: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)  # names and arguments
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None

    def take(self, chunk: Any) -> None:
        delta, logprobs = chunk.get("delta", chunk), chunk.get("logprobs") or {}
        self.text += delta.get("text") or delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            made = self.calls.setdefault(call["index"], ["", ""])
            made[0] += call["function"].get("name") or ""
            made[1] += call["function"].get("arguments") or ""
        self.token_ids += chunk.get("token_ids") or []
        if "content" in logprobs:
            self.logprobs += logprobs["content"]
        elif logprobs:
            columns = (logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"])
            self.logprobs += zip(*columns, strict=True)
        self.finish_reason = chunk["finish_reason"]


def check_compared(answers: dict[int, Any]) -> None:
    """Every kind of fact that is compared is in some answer; a field that is not sent would be equal to itself."""
    choices = [choice for found, *_ in answers.values() if isinstance(found, dict) for choice in found.values()]
    assert all(choice.token_ids for choice in choices), "no token ids"
    assert any(name for choice in choices for name, _ in choice.calls.values()), "no names of tool calls"
    assert any(choice.logprobs for choice in choices), "no log-probabilities"
    responses = [found for found, *_ in answers.values() if isinstance(found, list)]
    assert all(logprobs for texts in responses for _, logprobs in texts), "no log-probabilities of Responses"


async def kill(server: Server, clients: Clients, pauses: list[float], args: argparse.Namespace) -> None:
    """Kill the engine each time it has given tokens for a while."""
    while len(pauses) < args.kills and time.monotonic() < args.end:
        pid, begin = server.pid, time.monotonic()
        while clients.last_news < begin + args.life:
            await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        clients.num_kills += 1
        killed = time.monotonic()
        while server.pid == pid:
            await asyncio.sleep(0.005)
        back = time.monotonic()  # what came before was on its way
        while clients.last_news < back:
            await asyncio.sleep(0.005)
        pauses.append(clients.last_news - killed)
        print(f"kill {len(pauses)}: next token after {pauses[-1]:.2f} s", flush=True)


async def measure(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    calm = Clients(server.url, args.requests, args.streams, args.tokens)
    begin = time.monotonic()
    await calm.run()
    print(f"{args.requests} requests without kills: {time.monotonic() - begin:.1f} s", flush=True)
    num_requests = num_differ = most_deaths = 0
    pauses: list[float] = []
    errors: list[str] = []
    while len(pauses) < args.kills and not errors and time.monotonic() < args.end:
        clients = Clients(server.url, args.requests, args.streams, args.tokens)
        killing = asyncio.create_task(kill(server, clients, pauses, args))
        await clients.run()
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
        num_requests += args.requests
        errors += clients.errors
        most_deaths = max(most_deaths, clients.most_deaths)
        num_differ += sum(clients.answers.get(index) != answer for index, answer in calm.answers.items())
    check_compared(calm.answers)
    return {
        "requests": num_requests,
        "kills": len(pauses),
        "errors": calm.errors + errors,
        "answers_that_differ": num_differ,
        "most_deaths_within_a_stream": most_deaths,
        "pauses": pauses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--life", type=float, default=0.5, help="seconds that an engine gives tokens before its end")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--requests", type=int, default=48, help="asked in one round")
    parser.add_argument("--tokens", type=int, default=150, help="of each answer")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--standby", action="store_true", help="with a loaded engine that takes over; --life 8")
    parser.add_argument("--minutes", type=float, default=600.0, help="after which no more engines are killed")
    args = parser.parse_args()
    args.end = time.monotonic() + 60 * args.minutes
    with serving(args.model, *(["--standby"] if args.standby else [])) as server:
        found = asyncio.run(measure(server, args))
    pauses = found["pauses"]
    table = Table(title=f"SIGKILL under {args.streams} streams, {args.model}", show_header=False)
    for name in ("requests", "kills", "most_deaths_within_a_stream", "answers_that_differ"):
        table.add_row(name.replace("_", " "), str(found[name]))
    table.add_row("errors that clients saw", str(len(found["errors"])))
    table.add_row("pause, median and worst", f"{statistics.median(pauses):.2f} s, {max(pauses):.2f} s")
    Console().print(table)
    print(*found["errors"][:5], sep="\n")
    del args.end
    results = {**vars(args), **found, "median_pause": statistics.median(pauses)}
    name = "kills_standby" if args.standby else "kills"
    print(f"written to {write_results(name, environment('quire', 'torch'), results)}")
    if found["errors"] or found["answers_that_differ"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
