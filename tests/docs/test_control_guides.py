"""docs/guides/adapters.md and control.md are true: their code trains and serves, their commands are obeyed."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import httpx
import pytest

from quire.cli.main import main
from quire.server.control.verbs import VERBS
from tests.e2e.serving import start

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
ADAPTERS = (GUIDES / "adapters.md").read_text(encoding="utf-8")
CONTROL = (GUIDES / "control.md").read_text(encoding="utf-8")


def code_of(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page, flags=re.M | re.S)


def commands(page: str, program: str) -> list[list[str]]:
    return [shlex.split(line)[1:] for line in re.findall(rf"^\$ ({program} .*)$", page, flags=re.M)]


@pytest.mark.nightly
def test_an_adapter_is_trained_served_and_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUIRE_ADMIN_KEY", "operator")
    train, offline = code_of(ADAPTERS)
    exec(compile(train, "adapters.md", "exec"), {})
    capsys.readouterr()
    exec(compile(offline, "adapters.md", "exec"), {})
    plain, adapted = capsys.readouterr().out.splitlines()[-2:]
    assert "Strelsau" in adapted
    assert "Strelsau" not in plain
    (command,) = commands(ADAPTERS, "quire")
    running = start(*command[1:], "--lora-root", "adapters", "--kv-cache-memory", "64MiB")
    try:
        with httpx.Client(base_url=running.url, timeout=60) as client:
            call, load, unload = commands(ADAPTERS, "curl")
            bodies = [json.loads(each[each.index("-d") + 1]) for each in (call, load, unload)]
            answer = client.post("/v1/completions", json=bodies[0])
            assert "Strelsau" in answer.json()["choices"][0]["text"]
            key = {"authorization": "Bearer operator"}
            assert client.post("/v1/load_lora_adapter", json=bodies[1], headers=key).status_code == 200
            again = client.post("/v1/completions", json=bodies[0] | {"model": "towns"})
            assert again.json()["choices"] == answer.json()["choices"]
            assert client.post("/v1/unload_lora_adapter", json=bodies[2], headers=key).status_code == 200
    finally:
        assert running.stop() == 0


def test_every_verb_is_in_the_table_and_every_command_of_the_page_is_obeyed(tmp_path: Path) -> None:
    rows = re.findall(r"^\| (`[^|]*`) \|", CONTROL, flags=re.M)
    assert {name for row in rows for name in re.findall(r"`([\w-]+)`", row)} == set(VERBS)
    serve, *controls = commands(CONTROL, "quire")
    where = f"unix:{tmp_path}/admin"

    def here(words: list[str]) -> list[str]:
        return [where if word.startswith("unix:") else word for word in words]

    running = start(*here(serve)[1:], "--max-model-len", "512", "--kv-cache-memory", "64MiB")
    try:
        for words in controls:
            expected = 1 if "FOLDER" in " ".join(words) else 0
            assert main(here(words)) == expected, words
    finally:
        assert running.stop() == 0


def test_the_code_about_sleep() -> None:
    (code,) = code_of(CONTROL)
    exec(compile(code, "control.md", "exec"), {})
