"""`quire serve` gives flags to the right half, and fails on bad ones before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from quire.cli import main as cli
from quire.config.engine import EngineConfig
from quire.config.groups import ServerConfig
from quire.server import launch


def test_flags_reach_the_server_and_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(launch, "run_server", lambda *args: calls.append(args))
    flags = ["--port", "0", "--served-model-name", "a", "--served-model-name", "b", "--max-model-len", "64"]
    assert cli.main(["serve", "my-model", *flags]) == 0
    assert calls == [
        (
            EngineConfig.from_flat(model="my-model", max_model_len=64),
            ServerConfig(port=0, served_model_name=("a", "b")),
        )
    ]


def test_a_wrong_setting_is_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--port", "70000"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: port is 70000 but must be between 0 and 65535"


def test_a_missing_model_is_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "./no/such/model", "--port", "0"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")
