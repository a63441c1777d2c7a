"""The spare process: imports and nothing else, taken once, and gone with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire.config.engine import EngineConfig
from quire.engine.spare import NO_SPARE, SPARE_MEMORY, SpareEngine
from quire.engine.zmq_client import ZmqClient
from tests.engine.fake_engine import COMMAND
from tests.engine.processes import LIMIT, Watch, finish, joined, request


class Lines:
    """A log that can be waited on."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._news = threading.Condition()

    def take(self, line: str) -> None:
        with self._news:
            self.lines.append(line)
            self._news.notify_all()

    def wait(self, words: str) -> None:
        with self._news:
            assert self._news.wait_for(lambda: any(words in line for line in self.lines), LIMIT), self.lines


@contextmanager
def spare_of_fakes() -> Iterator[tuple[SpareEngine, Lines]]:
    log = Lines()
    spare = SpareEngine(COMMAND, log.take)
    try:
        yield spare, log
    finally:
        spare.stop()


def started(spare: SpareEngine) -> int:
    spare.start()
    assert spare.pid is not None
    return spare.pid


def test_it_waits_and_then_serves_as_an_engine_that_was_launched() -> None:
    with spare_of_fakes() as (spare, log):
        pid = started(spare)
        assert started(spare) == pid, "there is one already"
        log.wait("stands by")
        client = ZmqClient(EngineConfig.from_flat(model="fake"), child=spare.take())
        try:
            client.wait_ready()
            assert client.pid == pid
            assert len(joined(finish(client, [request("a")]), "a")) == 8
            assert spare.take() is None, "it is handed over once"
        finally:
            client.shutdown()


def test_one_that_is_still_importing_can_be_taken() -> None:
    with spare_of_fakes() as (spare, _):
        pid = started(spare)
        client = ZmqClient(EngineConfig.from_flat(model="fake"), child=spare.take())
        try:
            client.wait_ready()
            assert client.pid == pid
        finally:
            client.shutdown()


def test_a_dead_one_is_not_handed_over(caplog: pytest.LogCaptureFixture) -> None:
    with spare_of_fakes() as (spare, log):
        pid = started(spare)
        log.wait("stands by")
        watch = Watch(pid)
        os.kill(pid, signal.SIGKILL)
        watch.wait()
        deadline = time.monotonic() + 10
        while (child := spare.take()) is not None and time.monotonic() < deadline:  # its end is noticed by a thread
            spare._child = child
        assert child is None
        assert "the spare was of no use" in caplog.text
        assert started(spare) != pid


def test_it_cannot_be_launched(caplog: pytest.LogCaptureFixture) -> None:
    spare = SpareEngine(("/nowhere/python",))
    spare.start()
    assert "no spare engine process can be launched" in caplog.text
    assert spare.take() is None
    spare.stop()


def test_stopping_ends_it_at_once() -> None:
    with spare_of_fakes() as (spare, _):
        watch = Watch(started(spare))
        spare.stop()
        watch.wait()
        spare.stop()


def test_without_one_nothing_is_launched() -> None:
    NO_SPARE.start()
    assert NO_SPARE.take() is None
    NO_SPARE.stop()


PARENT = """
import os, sys
from quire.engine.spare import SpareEngine

spare = SpareEngine(take_line=lambda line: print(spare.pid, line, flush=True))
spare.start()
print(spare.pid, flush=True)
sys.stdin.read()
"""


def test_it_holds_imports_only_and_dies_with_a_parent_that_is_killed() -> None:
    """The real one. It is interrupted too, as Ctrl-C interrupts all processes of a terminal."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    with parent.stdin, parent.stdout:
        pid = int(parent.stdout.readline())
        watch = Watch(pid)
        lines = iter(parent.stdout.readline, "")
        assert any("stands by" in line for line in lines)
        os.kill(pid, signal.SIGINT)
        status = Path(f"/proc/{pid}/status").read_text()
        resident = int(status.partition("VmRSS:")[2].split()[0]) << 10
        assert 100 << 20 < resident < SPARE_MEMORY, "it has imported torch, and loaded nothing"
        assert not watch.has_ended()
        parent.kill()
        parent.wait()
        watch.wait()
