"""docs/guides/several-models.md is true: its file is read as it says, and its commands are answered."""

from __future__ import annotations

import json
import re
import shlex
import signal
from pathlib import Path

import httpx
import pytest

from quire.config.groups import ServerConfig
from quire.config.models_file import PER_MODEL, read_models
from tests.e2e.serving import start

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "several-models.md").read_text(encoding="utf-8")
(FILE,) = re.findall(r"^```toml\n(.*?)^```$", GUIDE, flags=re.M | re.S)


def test_the_file_of_the_guide_is_read_and_every_setting_of_its_own_is_named(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text(FILE)
    models = read_models(str(tmp_path / "models.toml"), {}, ServerConfig())
    assert [entry.names for entry in models.models] == [("chat", "gpt-4"), ("embedder",)]
    assert models.models[1].engine.model.runner == "pooling"
    for name in PER_MODEL:
        assert f"`{name}`" in GUIDE
    for name in ("memory_budget", "host_memory_budget", "min_residence"):
        assert f"| `{name}` |" in GUIDE


@pytest.mark.nightly
def test_the_commands_of_the_guide_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.toml").write_text(FILE)
    serve, *calls = [shlex.split(line) for line in re.findall(r"^\$ (.*)$", GUIDE, flags=re.M)]
    running = start(*serve[2:])
    try:
        with httpx.Client(base_url=running.url, timeout=120) as client:
            for call in calls:
                path = call[1].removeprefix("http://127.0.0.1:8000")
                answer = client.post(path, json=json.loads(call[call.index("-d") + 1]))
                assert answer.status_code == 200, answer.text
    finally:
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 0
