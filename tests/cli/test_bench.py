"""quire bench from the command line: tables for people, JSON for machines, files where asked."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.bench import startup
from quire.cli.bench import KINDS
from quire.cli.main import main
from quire.frontend.llm import LLM
from tests.bench.fake_server import Behaviour, FakeServer
from tests.frontend.fake_client import FakeClient, text_model

SHORT = ("--num-prompts", "4", "--input-len", "8", "--output-len", "3")


def fake_llm(**settings: Any) -> LLM:
    return LLM.from_client(FakeClient(), text_model())


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(quire), "LLM", fake_llm)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_explains_its_flags(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", kind, "--help"])
    assert exit_info.value.code == 0
    assert ("--table" if kind == "steps" else "--output-dir") in capsys.readouterr().out


def test_serve_prints_a_table_and_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        arguments = ["--base-url", server.url, *SHORT, "--output-dir", str(tmp_path), "--experiment-name", "one"]
        assert main(["bench", "serve", *arguments, "--goodput", "ttft:5000"]) == 0
    out, err = capsys.readouterr()
    assert "fake-model at http://127.0.0.1" in out
    assert "TTFT (first token)" in out
    assert "100.0% of all" in out
    assert "wrote" in err
    report = json.loads((tmp_path / "one" / "serve.json").read_text())
    assert report["results"]["summary"]["completed"] == 4
    assert report["settings"]["served_model"] == "fake-model"


def test_serve_prints_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        assert main(["bench", "serve", "--base-url", server.url, *SHORT, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["results"]["summary"]["output_tokens"] == 12
    assert len(report["results"]["requests"]) == 4


def test_sweep_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def sweep(*more: str) -> int:
        arguments = ["--base-url", server.url, *SHORT, "--output-dir", str(tmp_path), "--experiment-name", "exp"]
        return main(["bench", "sweep", *arguments, *more])

    with FakeServer() as server:
        assert sweep("--concurrencies", "1", "2") == 0
        assert len(server.bodies) == 8
        assert sweep("--concurrencies", "1", "2", "4") == 1
        assert "--resume" in capsys.readouterr().err
        assert sweep("--concurrencies", "1", "2", "4", "--resume") == 0
        assert len(server.bodies) == 12
        assert sweep("--request-rates", "1000", "inf") == 0
    assert "concurrency 2: done before" in capsys.readouterr().err
    assert (tmp_path / "exp" / "sweep-curve.svg").read_text().startswith("<svg")


def test_a_bad_point_is_refused_before_the_first_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        assert main(["bench", "sweep", "--base-url", server.url, "--concurrencies", "1", "0"]) == 1
        assert not server.bodies
    assert "--max-concurrency is 0" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["steps --table", "spec --output-dir", "embed --output-dir"])
def test_where_nothing_can_be_written_is_known_before_the_measurement(
    arguments: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert main(["bench", *arguments.split(), str(file / "inside"), "--model", "no-such-model"]) == 1
    flag = arguments.split()[1]
    assert f"{flag} is {str(file / 'inside')!r}, but {file} is not a folder" in capsys.readouterr().err


def test_help_says_which_model_embeds(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["bench", "embed", "--help"], ["embed", "--help"]):
        with pytest.raises(SystemExit):
            main(arguments)
        assert "Default: minilm." in " ".join(capsys.readouterr().out.split())


def test_nobody_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        url = server.url
    assert main(["bench", "serve", "--base-url", url, *SHORT]) == 1
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith(f"error: no answer from {url}/v1/models")


@pytest.mark.usefixtures("offline")
def test_latency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--batch-size", "2", "--input-len", "8", "--output-len", "4", "--output-dir", str(tmp_path)]
    assert main(["bench", "latency", *arguments]) == 0
    assert "2 x (8 in, 4 out), 5 times" in capsys.readouterr().out
    report = json.loads((tmp_path / "latency" / "latency.json").read_text())
    assert report["results"]["batch_ms"]["count"] == 5


@pytest.mark.usefixtures("offline")
def test_throughput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "throughput", *SHORT, "--token-ids", "--json", "--output-dir", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["results"]["summary"]["output_tokens"] == 12
    names = {path.name for path in (tmp_path / "throughput").iterdir()}
    assert names == {"throughput.json", "throughput.html", "throughput-timeline.svg", "throughput-lengths.svg"}


def test_startup(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(startup, "run_probe", lambda settings: {"import": 1.0, "ready": 1.5})
    assert main(["bench", "startup", "--repeats", "2", "--max-model-len", "64"]) == 0
    out = capsys.readouterr().out
    assert "ready" in out
    assert "1.500" in out


@pytest.mark.parametrize("arguments", [["bench", "--debug", "serve"], ["bench", "serve", "--debug"]])
def test_debug_may_stand_before_or_after_the_kind(arguments: list[str]) -> None:
    with pytest.raises(quire.ConfigError, match="--base-url"):
        main([*arguments, "--base-url", "nowhere"])


def test_drafts_that_are_off_are_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "spec", "--speculative-config", '{"method": "none"}']) == 1
    assert "method is none, so nothing would be measured" in capsys.readouterr().err


def test_an_interrupt_ends_a_run_quietly() -> None:
    with FakeServer(Behaviour(first=600)) as server:
        command = [sys.executable, "-m", "quire", "bench", "serve", "--base-url", server.url, *SHORT]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert server.busy.wait(60)
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == 130
