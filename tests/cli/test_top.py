"""quire top without a terminal: one picture, of the console's stream or of metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.cli.main import main
from quire.cli.top import bar, sparkline
from quire.cli.top_feed import percentiles
from quire.server.state import announced
from tests.cli.console_server import console_server


@pytest.fixture(autouse=True)
def no_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("QUIRE_API_KEY", "secret,other")


def test_a_frame_of_the_console(capsys: pytest.CaptureFixture[str]) -> None:
    with console_server() as server, announced(server.address, ("m",)):
        assert main(["top"]) == 0  # the only server that `quire ps` knows
    out = capsys.readouterr().out
    for text in ("123.4", "42%", "25%", "prefill 3,072 of 8,190", "no free KV blocks", "1.5 s", "a line of the log"):
        assert text in out


def test_a_server_without_a_console_has_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    with console_server(has_console=False) as server:
        assert main(["top", server.address]) == 0
    out = capsys.readouterr().out
    for text in ("starting", "loading weights", "50%", "100 / 100 / 200 ms"):
        assert text in out


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with console_server() as server:
        assert main(["top", server.address, "--api-key", "wrong"]) == 1
    assert "asks for an API key" in capsys.readouterr().err
    assert main(["top", server.address]) == 1
    assert "no answer from" in capsys.readouterr().err
    with console_server() as server:
        server.ending.set()  # the stream ends before its first frame
        assert main(["top", server.address]) == 1
    assert "has ended" in capsys.readouterr().err
    assert main(["top", "ftp://x"]) == 1
    assert "must be like http://127.0.0.1:8000" in capsys.readouterr().err
    assert main(["top", "nobody"]) == 1
    assert "no server 'nobody' runs here" in capsys.readouterr().err


def test_pictures_of_numbers() -> None:
    from collections import deque

    assert sparkline(deque([0.0, 5.0, 10.0])) == " ▄█"
    assert bar(0.5, 4) == "██░░"
    assert percentiles({}, "x").p50 is None
