"""State files of servers: private, and believed only while their process lives and is the same one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from quire.cli.main import main
from quire.server.state import announced, process_begin, running_servers, state_folder, terminate


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    return state_folder()


def test_a_server_is_known_while_it_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with announced("http://127.0.0.1:8123", ("a", "b")):
        assert folder.stat().st_mode & 0o777 == 0o700
        (path,) = folder.iterdir()
        assert path.stat().st_mode & 0o777 == 0o600
        (state,) = running_servers()
        assert (state.pid, state.models) == (os.getpid(), ["a", "b"])
        assert main(["ps"]) == 0
        assert "http://127.0.0.1:8123" in capsys.readouterr().out
    assert list(folder.iterdir()) == []
    assert main(["ps", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_a_process_id_that_is_used_again_is_not_stopped(folder: Path) -> None:
    with announced("http://127.0.0.1:8123", ("a",)):
        (state,) = running_servers()
        (path,) = folder.iterdir()
        older = msgspec.structs.replace(state, begun="another boot/1")
        path.write_bytes(msgspec.json.encode(older))
        assert terminate(older) is False
        assert running_servers() == []
        assert not path.exists()


@pytest.mark.parametrize("loose", ["file", "folder"])
def test_files_that_others_could_write_are_not_believed(folder: Path, loose: str) -> None:
    with announced("http://127.0.0.1:8123", ("a",)):
        (path,) = folder.iterdir()
        (path if loose == "file" else folder).chmod(0o777)
        assert running_servers() == []


def test_stop_ends_the_server_that_is_meant(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys, time; from quire.server.state import announced\n"
        "with announced(sys.argv[1], ('m',)): print('up', flush=True); time.sleep(60)"
    )
    servers = [
        subprocess.Popen([sys.executable, "-c", code, f"http://127.0.0.1:{port}"], stdout=subprocess.PIPE)
        for port in (8121, 8122)
    ]
    try:
        for server in servers:
            assert server.stdout is not None
            assert server.stdout.readline() == b"up\n"
        assert main(["stop"]) == 1
        assert "running: m at http://127.0.0.1:8121; m at http://127.0.0.1:8122" in capsys.readouterr().err
        assert main(["stop", "m"]) == 1
        assert "2 servers fit" in capsys.readouterr().err
        assert main(["stop", "9999"]) == 1
        assert main(["stop", "8122"]) == 0
        assert servers[1].wait(20) == -signal.SIGTERM
        assert servers[0].poll() is None
        assert main(["stop"]) == 1, "which one has to be said, also of the only one"
        assert servers[0].poll() is None
        assert main(["stop", "m:latest"]) == 0
        assert servers[0].wait(20) == -signal.SIGTERM
    finally:
        for server in servers:
            server.kill()
            server.communicate()
    assert process_begin(servers[0].pid) is None
