"""The whole server as a process, over a fake engine process that fails in every way: what clients and log say."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from quire.server.access import PROBES
from tests.e2e.serving import Running
from tests.e2e.tiny_tokenizer import write_tokenizer
from tests.engine.fake_engine import EXIT, STALL, STICKY
from tests.engine.processes import Watch

COMPLETIONS = "/v1/completions"


def serve(folder: Path, *flags: str) -> Running:
    """A server over a fake engine, which obeys the folder's name."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    write_tokenizer(folder)
    command = [sys.executable, "-m", "tests.server.fake_serve", str(folder), "--port", "0", *flags]
    return Running(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))


def ready(running: Running) -> Running:
    running.url = running.wait_line(r"serving on (https?://[\d.:]+), ready")[1]
    return running


def ask(server: Running, token: int, **fields: object) -> httpx.Response:
    return httpx.post(f"{server.url}{COMPLETIONS}", json={"prompt": [token], "max_tokens": 4, **fields}, timeout=30)


def test_an_engine_that_keeps_dying_ends_the_server_with_the_cause_as_its_last_line(tmp_path: Path) -> None:
    server = serve(tmp_path / "die-at-start", "--max-restarts", "1")
    assert server.wait() == 1
    assert "exited with status 3" in server.log[-1]
    assert "about to die" in server.log[-1]
    assert sum("restart 1 in" in line for line in server.log) == 1


def test_a_wrong_model_is_the_last_line_and_is_not_tried_again(tmp_path: Path) -> None:
    server = serve(tmp_path / "fail-at-start")
    assert server.wait() == 1
    assert server.log[-1] == "error: no model 'fail-at-start'; give another\n"
    assert not any("restart" in line for line in server.log)


@pytest.mark.parametrize(("order", "cause"), [(STICKY, "the device failed"), (EXIT, "exited with status 9")])
def test_a_request_that_kills_two_engines_is_refused_with_the_cause(tmp_path: Path, order: int, cause: str) -> None:
    server = ready(serve(tmp_path / "fake"))
    failed = ask(server, order)
    assert failed.status_code == 500
    assert cause in failed.json()["error"]["message"]
    wait_third_engine(server)
    assert ask(server, 5).status_code == 200
    assert server.stop() == 0


def wait_third_engine(server: Running) -> None:
    server.wait_line("restart 2 in")
    second = next(index for index, line in enumerate(server.log) if "restart 2 in" in line)
    server.engine_pid(after=second)


def test_a_stall_is_told_by_health_and_its_stacks_are_in_the_log(tmp_path: Path) -> None:
    server = ready(serve(tmp_path / "fake", "--stall-timeout", "0.5", "--log-format", "text"))
    with httpx.Client(base_url=server.url, timeout=30) as client:
        stalled = ask_and_leave(server, STALL)
        server.wait_line("no step has finished")
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "stalled")
        server.wait_line(r"File .*fake_engine\.py.* in execute")
        stalled.close()
    assert server.stop() == 0


@pytest.mark.parametrize("token", [5, STALL])
def test_sigint_twice_stops_now_even_inside_a_step(tmp_path: Path, token: int) -> None:
    server = ready(serve(tmp_path / "fake,slow,long", "--drain-timeout", "600"))
    engine = Watch(server.engine_pid())
    waiting = ask_and_leave(server, token, max_tokens=4000, ignore_eos=True)
    if token == STALL:
        server.wait_line("^stalling")
    else:
        assert b"200 OK" in waiting.recv(100)
    begin = time.monotonic()
    server.process.send_signal(signal.SIGINT)
    server.wait_line("SIGINT: finishing .* press Ctrl-C again")
    server.wait_line(r"waiting at most 600 s for 1 request \(cmpl-\w+\) to finish")
    server.process.send_signal(signal.SIGINT)
    assert server.wait() == 0
    assert time.monotonic() - begin < 10  # less than any grace that a drain would give
    engine.wait()
    assert "Traceback" not in "".join(server.log)
    said = b"".join(iter(lambda: waiting.recv(1 << 16), b""))
    assert b"the engine was shut down" in said or b"the server is stopping" in said
    waiting.close()


def test_a_stream_without_a_token_outlives_its_engine(tmp_path: Path) -> None:
    """Another request hangs the engine, which is killed; the stream's client hears keep-alives, then its answer."""
    server = ready(serve(tmp_path / "fake"))
    culprit = ask_and_leave(server, STALL)
    server.wait_line("^stalling")
    begun = len(server.log)
    body = {"prompt": [5], "max_tokens": 4, "stream": True}
    with httpx.stream("POST", f"{server.url}{COMPLETIONS}", json=body, timeout=30) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert next(lines) == ": keep-alive"
        culprit.close()
        server.wait_line("POST '/v1/completions' 499", after=begun)
        os.kill(server.engine_pid(), signal.SIGKILL)
        heard = "\n".join(lines)
    assert "error" not in heard
    assert '"finish_reason":"length"' in heard
    server.engine_pid(after=begun)
    assert server.stop() == 0


def test_a_stream_that_kills_engines_kills_two_and_no_more(tmp_path: Path) -> None:
    server = ready(serve(tmp_path / "fake"))
    answer = ask(server, EXIT, stream=True)
    assert "exited with status 9" in answer.text
    wait_third_engine(server)
    assert ask(server, 5).status_code == 200
    assert server.stop() == 0
    assert not any("restart 3 in" in line for line in server.log)


def ask_and_leave(server: Running, token: int, **fields: object) -> socket.socket:
    """Send a request whose answer nobody waits for; the connection stays open until it is closed."""
    body = json.dumps({"prompt": [token], "stream": True, **fields}).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def test_every_line_is_json_when_asked_also_those_of_the_engine(tmp_path: Path) -> None:
    server = ready(serve(tmp_path / "fake", "--log-format", "json"))
    assert ask(server, STICKY).status_code == 500
    wait_third_engine(server)
    assert server.stop() == 0
    entries = [json.loads(line) for line in server.log]
    assert {"quire.engine.process", "quire.server.launch"} <= {entry["logger"] for entry in entries}
    assert any(re.search("failed", entry["message"]) for entry in entries if entry["level"] == "error")


def test_keys_on_every_route_that_the_server_says_it_has(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first\nsecond\n")
    server = ready(serve(tmp_path / "fake", "--api-key-file", str(keys)))
    right, wrong = {"authorization": "Bearer second"}, {"authorization": "Bearer third"}
    with httpx.Client(base_url=server.url, timeout=30) as client:
        described = client.get("/openapi.json", headers=right).json()["paths"]
        routes = {(method, path) for path, methods in described.items() for method in methods}
        routes |= {("get", "/docs"), ("get", "/openapi.json")}
        assert ("post", COMPLETIONS) in routes

        def status(method: str, path: str, headers: dict[str, str]) -> int:
            with client.stream(method, path, headers=headers) as answer:  # some never end
                return answer.status_code

        for method, path in sorted(routes):
            statuses = [status(method, path, headers) for headers in ({}, wrong, right)]
            expected = [statuses[2]] * 2 if path in PROBES or "lora_adapter" in path else [401, 401]
            assert statuses[:2] == expected, path
            assert statuses[2] not in (401, 500), path
    assert server.stop() == 0
