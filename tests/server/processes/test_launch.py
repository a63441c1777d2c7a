"""A server of two API processes, as processes, over a fake engine: who answers, who dies, who is waited for."""

from __future__ import annotations

import json
import os
import signal
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.config.groups import ServerConfig
from quire.server.processes.forward import PROCESS_HEADER
from quire.server.processes.launch import check_processes
from quire.types.errors import ConfigError
from tests.e2e.serving import Running
from tests.engine.processes import Watch, finish, joined, launch, request
from tests.metrics.scrape import Scrape
from tests.server.helpers import make_certificate
from tests.server.test_run_server import ready, serve

LIMIT = 30.0  # seconds
LONG = 600  # tokens, of 2 ms each


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = ready(serve(tmp_path_factory.mktemp("api") / "fake,slow,long", "--api-server-count", "2"))
    yield running
    if running.process.poll() is None:
        assert running.stop() == 0, "".join(running.log)


def pid_of(server: Running, index: int, after: int = 0) -> int:
    return int(server.wait_line(rf"API process (\d+) is ready, {index} of 2", after)[1])


@contextmanager
def on_process(server: Running, index: int, trust: ssl.SSLContext | bool = False) -> Iterator[httpx.Client]:
    """A client whose connection a certain process has accepted."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        with httpx.Client(base_url=server.url, timeout=LIMIT, verify=trust) as client:
            try:
                is_there = client.get("/health").headers[PROCESS_HEADER] == str(index)
            except httpx.TransportError:
                continue
            if is_there:
                yield client
                return
    raise AssertionError(f"process {index} accepts no connection: {''.join(server.log)}")


def scrape(client: httpx.Client) -> Scrape:
    return Scrape(client.get("/metrics").text)


class Stream:
    """One streamed completion, read on a thread."""

    def __init__(self, client: httpx.Client, num_tokens: int = LONG) -> None:
        self.tokens = 0
        self.is_done = False
        self.error: Exception | None = None
        self._body = {"prompt": [5, 6], "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        self._body["return_token_ids"] = True
        self._client = client
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            with self._client.stream("POST", "/v1/completions", json=self._body) as answer:
                assert answer.status_code == 200, answer.read()
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        self.is_done = True
                    elif line.startswith("data: "):
                        event = json.loads(line.removeprefix("data: "))
                        self.tokens += sum(len(choice.get("token_ids") or ()) for choice in event["choices"])
        except (httpx.TransportError, AssertionError) as error:
            self.error = error


def complete(client: httpx.Client, prompt: list[int], **fields: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True, **fields}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer


def test_both_processes_give_the_tokens_of_one_engine_and_any_scrape_counts_both(server: Running) -> None:
    prompts = [[5 + index, 7, 9] for index in range(4)]
    alone = launch("fake")
    alone.wait_ready()
    try:
        outputs = finish(alone, [request(str(index), prompt) for index, prompt in enumerate(prompts)])
    finally:
        alone.shutdown()
    with on_process(server, 0) as first, on_process(server, 1) as second:
        before = scrape(first).get("generation_tokens_total")
        for index, prompt in enumerate(prompts):
            for client in (first, second):
                answer = complete(client, prompt)
                assert answer.json()["choices"][0]["token_ids"] == joined(outputs, str(index))
        assert scrape(first).get("generation_tokens_total") == before + 64
        assert scrape(second).get("generation_tokens_total") == before + 64
        assert scrape(second).get("num_requests_running") == 0


def test_a_key_belongs_to_one_process_whichever_is_asked(server: Running) -> None:
    with on_process(server, 0) as first, on_process(server, 1) as second:
        makers = set()
        for key in ("a", "b", "c", "d"):
            body, headers = {"prompt": [5], "max_tokens": 8}, {"Idempotency-Key": key}
            answers = [client.post("/v1/completions", json=body, headers=headers) for client in (first, second)]
            assert answers[0].json() == answers[1].json()
            assert answers[0].json()["object"] == "text_completion"
            assert answers[0].headers[PROCESS_HEADER] == answers[1].headers[PROCESS_HEADER]
            makers.add(answers[0].headers[PROCESS_HEADER])
        assert makers == {"0", "1"}
        refused = second.get("/v1/responses/resp_nobody")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
        refused = first.post("/v1/unload_lora_adapter", json={"lora_name": "a"})
        assert refused.status_code == 403  # the operator's, who has no key here


def test_with_tls_processes_still_answer_for_each_other(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    trust = ssl.create_default_context(cafile=certificate["ssl_certfile"])
    flags = [word for name, value in certificate.items() for word in ("--" + name.replace("_", "-"), value)]
    server = ready(serve(tmp_path / "fake", "--api-server-count", "2", *flags))
    try:
        with on_process(server, 0, trust) as first, on_process(server, 1, trust) as second:
            for key in ("a", "b", "c", "d"):
                body, headers = {"prompt": [5], "max_tokens": 8}, {"Idempotency-Key": key}
                answers = [client.post("/v1/completions", json=body, headers=headers) for client in (first, second)]
                assert [answer.status_code for answer in answers] == [200, 200]
                assert answers[0].json() == answers[1].json()
            assert scrape(second).get("generation_tokens_total") > 0
    finally:
        assert server.stop() == 0, "".join(server.log)


def test_a_killed_process_comes_back_and_the_streams_of_the_other_go_on(server: Running) -> None:
    begun, victim = len(server.log), pid_of(server, 0)
    with on_process(server, 0) as first, on_process(server, 1) as second:
        lost, kept = Stream(first), Stream(second)
        wait_until(lambda: lost.tokens > 0 and kept.tokens > 0)
        counted = scrape(second).get("num_requests_running")
        os.kill(victim, signal.SIGKILL)
        kept.thread.join(LIMIT)
        lost.thread.join(LIMIT)
        assert counted == 2
        assert kept.is_done
        assert kept.tokens == LONG
        assert lost.error is not None
        wait_until(lambda: scrape(second).get("num_requests_running") == 0)
        wait_until(lambda: second.get("/load").json() == {"server_load": 0})
    assert pid_of(server, 0, begun) != victim
    with on_process(server, 0) as back:
        assert complete(back, [5, 7, 9]).headers[PROCESS_HEADER] == "0"


def test_sigterm_lets_the_streams_of_all_processes_end(server: Running) -> None:
    """The last test: it ends the server."""
    processes = [Watch(int(line.split("API process ")[1].split()[0])) for line in living(server)]
    engine = Watch(server.last_engine_pid())
    with on_process(server, 0) as first, on_process(server, 1) as second:
        streams = [Stream(first), Stream(second)]
        wait_until(lambda: all(stream.tokens > 0 for stream in streams))
        server.process.send_signal(signal.SIGTERM)
        server.wait_line("SIGTERM: finishing")
        for stream in streams:
            stream.thread.join(LIMIT)
            assert (stream.tokens, stream.is_done, stream.error) == (LONG, True, None)
    assert server.wait() == 0
    for process in (*processes, engine):
        process.wait()
    assert "Traceback" not in "".join(server.log)


def test_a_server_that_is_killed_leaves_neither_processes_nor_files(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path_factory.mktemp("t")
    monkeypatch.setenv("TMPDIR", str(temporary))
    server = ready(serve(tmp_path_factory.mktemp("api") / "fake", "--api-server-count", "2"))
    processes = [Watch(pid_of(server, index)) for index in range(2)]
    engine = Watch(server.last_engine_pid())
    assert list(temporary.iterdir())
    server.process.kill()
    server.wait()
    for process in (*processes, engine):
        process.wait()
    assert list(temporary.iterdir()) == []


def living(server: Running) -> list[str]:
    """The last line about each process."""
    lines = [line for line in server.log if "API process" in line and "is ready" in line]
    return [next(line for line in reversed(lines) if f", {index} of 2" in line) for index in range(2)]


@pytest.mark.parametrize(
    ("name", "value"), [("journal", "/j"), ("lora_root", "/l"), ("keep_alive", True), ("models", "m.toml")]
)
def test_what_needs_one_process_is_refused_by_name(name: str, value: Any) -> None:
    settings = replace(ServerConfig(api_server_count=2), **{name: value})
    with pytest.raises(
        ConfigError, match=rf"{name} is set.*leave out --{name.replace('_', '-')}, or set --api-server"
    ):
        check_processes(settings)
