"""The engine process: leaves when it should and only then, and says why when it fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import msgspec
import pytest

from quire.engine.zmq_client import ZmqClient
from quire.types.errors import EngineDeadError, EngineStartError
from tests.engine.fake_engine import EXIT, POISON, STALL, STICKY
from tests.engine.processes import LIMIT, Watch, finish, joined, launch, request
from tests.fakes import generate_alone


@pytest.fixture
def temp_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for sockets, short enough for them."""
    folder = Path(tempfile.mkdtemp(prefix="q-"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def started(words: str = "fake") -> ZmqClient:
    client = launch(words)
    client.wait_ready()
    return client


def test_sigterm_finishes_what_runs_and_sigint_is_ignored() -> None:
    client = started("slow,long")
    watch = Watch(client.pid)
    client.add_request(request("a", max_tokens=60))
    outputs = client.get_outputs().outputs
    os.kill(client.pid, signal.SIGINT)
    os.kill(client.pid, signal.SIGTERM)
    outputs += finish(client)
    assert joined(outputs, "a") == generate_alone(request("a", max_tokens=60), 4096)[0]
    assert outputs[-1].finish_reason == "length"
    watch.wait()
    with pytest.raises(EngineDeadError, match="exited with status 0"):
        finish(client, [request("b")])
    client.shutdown()


def test_a_second_sigterm_does_not_wait() -> None:
    client = started("slow,long")
    watch = Watch(client.pid)
    client.add_request(request("a", max_tokens=4000))
    client.get_outputs()
    os.kill(client.pid, signal.SIGTERM)
    client.get_outputs()
    assert not watch.has_ended()
    os.kill(client.pid, signal.SIGTERM)
    watch.wait()
    client.shutdown()


@pytest.mark.parametrize("words", ["long", "hang-at-start"])
def test_no_orphan_and_no_file_is_left_when_the_parent_is_killed(words: str, temp_folder: Path) -> None:
    code = f"""
import signal
from tests.engine.processes import launch
from quire.types.messages import StartupPhase
def tell(phase):
    print(client.pid, flush=True)
    while True:
        signal.pause()
client = launch({words!r}, on_phase=tell)
client.wait_ready()
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    watch = Watch(int(parent.stdout.readline()))
    parent.kill()
    watch.wait()
    parent.wait()
    parent.stdout.close()
    assert list(temp_folder.iterdir()) == []
    temp_folder.rmdir()


def test_shutdown_leaves_nothing_behind(temp_folder: Path) -> None:
    client = started()
    watch = Watch(client.pid)
    assert [path.name.startswith("quire-") for path in temp_folder.iterdir()] == [True]
    client.shutdown()
    watch.wait()
    client.shutdown()
    assert list(temp_folder.iterdir()) == []
    temp_folder.rmdir()


def test_shutdown_waits_for_a_device_that_ends_late() -> None:
    """Else ranks would be left to themselves, and one that is stopped by a signal would stay for ever."""
    lines: list[str] = []
    client = launch("ends-late", take_line=lines.append)
    client.wait_ready()
    client.shutdown()
    assert "the device has ended\n" in lines


def test_shutdown_while_it_starts_does_not_wait_for_the_start() -> None:
    client = launch("hang-at-start")
    watch = Watch(client.pid)
    client.shutdown()
    watch.wait()
    with pytest.raises(EngineDeadError, match="shut down"):
        client.wait_ready()


def test_a_step_that_never_ends_does_not_keep_the_process() -> None:
    stalling = threading.Event()
    client = launch(take_line=lambda line: stalling.set() if "stalling" in line else None)
    client.wait_ready()
    client.add_request(request("a", [STALL]))
    assert stalling.wait(LIMIT)
    watch = Watch(client.pid)
    client.shutdown()
    watch.wait()


def test_a_wrong_model_is_told_with_its_own_words(capfd: pytest.CaptureFixture[str]) -> None:
    client = launch("fail-at-start")
    with pytest.raises(EngineStartError, match=r"^no model 'fail-at-start'; give another$"):
        client.wait_ready()
    client.shutdown()
    assert "Traceback" not in capfd.readouterr().err


def test_a_lost_device_ends_the_engine_with_the_cause(capfd: pytest.CaptureFixture[str]) -> None:
    client = started()
    with pytest.raises(EngineDeadError, match="the device failed and cannot go on: lost"):
        finish(client, [request("a", [STICKY])])
    client.shutdown()
    assert "FakeStepError: lost" in capfd.readouterr().err


def test_a_death_without_a_word_is_told_by_its_status() -> None:
    client = started()
    with pytest.raises(EngineDeadError, match="exited with status 9"):
        finish(client, [request("a", [EXIT])])
    client.shutdown()


def test_bad_requests_fail_alone() -> None:
    client = started()
    wrong = request("wrong")
    msgspec.structs.force_setattr(wrong.params, "top_k", 1.5)  # as no caller can make it; the wire checks again
    requests = [request("a"), wrong, request("poison", [POISON]), request("long", [1] * 80), request("b")]
    outputs = finish(client, requests)
    errors = {output.request_id: output.error or "" for output in outputs if output.finish_reason == "error"}
    assert set(errors) == {"wrong", "poison", "long"}
    assert "top_k" in errors["wrong"]
    assert "poisoned" in errors["poison"]
    assert "max_model_len" in errors["long"]
    for name in ("a", "b"):
        assert joined(outputs, name) == generate_alone(request(name), 64)[0]
    client.shutdown()
