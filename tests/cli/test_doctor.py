"""quire doctor: what is wrong with a machine, and what to do about it."""

from __future__ import annotations

import json
import resource
import socket
from pathlib import Path

import pytest

from quire.cli import doctor
from quire.cli.main import main
from quire.kernels.cpu import build
from quire.platform import limits
from quire.platform.base import MemorySupply


def test_every_part_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = ["versions", "CPU", "compiler", "GPU", "memory", "disk", "limits", "port"]
    assert list(dict.fromkeys(finding["about"] for finding in found)) == names
    assert all(finding["fix"] for finding in found if finding["verdict"] != "ok")


def test_what_is_wrong_is_said_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    monkeypatch.setattr(limits, "available_memory", lambda: MemorySupply(1 << 30, "ulimit -v", "raise ulimit -v"))
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (256, 256))
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    monkeypatch.setattr(doctor, "check_cpu", lambda: iter(()))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["doctor", "--port", str(port)]) == 1
    out = capsys.readouterr().out
    for text in (
        "none of no-such-compiler is installed",
        "apt install g++",
        "raise ulimit -v; `quire fit MODEL`",
        "cannot be written to",
        "set QUIRE_CACHE",
        "256 open files",
        "ulimit -v unlimited",
        f"{port} cannot be used",
        f"--port {port + 1}",
    ):
        assert text in out


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ImportError("libtorch is missing")

    monkeypatch.setattr(doctor, "check_gpu", broken)
    (finding,) = [finding for finding in doctor.examine(0) if finding.about == "GPU"]
    assert (finding.verdict, "libtorch is missing" in finding.text) == ("bad", True)
