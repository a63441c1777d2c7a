"""The JavaScript clients and the Codex command of docs/agents.md against a live server, as the page prints them."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.agents.scripted import ANSWER, pointed_at, scripted_server, section
from tests.server.npm import package_folder

PACKAGES = (
    "openai@6.49.0",
    "@anthropic-ai/sdk@1.8.0",
    "ai@6.0.326",
    "@ai-sdk/openai@3.0.139",
    "@ai-sdk/openai-compatible@2.0.87",
    "@ai-sdk/anthropic@3.0.138",
    "zod@4.6.7",
)
CODEX = "@openai/codex@0.166.0"
INSTALL_LIMIT = 240.0
# Title on the page, and how often the model's answer is printed.
CLIENTS = [("npm openai", 2), ("@anthropic-ai/sdk", 2), ("Vercel AI SDK", 6)]


@pytest.mark.parametrize(("title", "times"), CLIENTS, ids=[title for title, _ in CLIENTS])
def test_the_client_works_as_printed(title: str, times: int, pytestconfig: pytest.Config) -> None:
    folder = npm_folder(pytestconfig)
    with scripted_server() as server:
        done = run_node(pointed_at(section(title, "javascript"), server.url), folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(ANSWER) == times, done.stdout


def test_codex_completes_a_turn(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    folder = codex_folder(pytestconfig)
    with scripted_server() as server:
        done = run_codex(pointed_at(section("codex exec", "bash"), server.url), folder, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert ANSWER in done.stdout
    assert len(server.client.added) >= 2  # it called a tool and went on


def npm_folder(config: pytest.Config) -> Path:
    return package_folder(config, *PACKAGES, limit=INSTALL_LIMIT)


def codex_folder(config: pytest.Config) -> Path:
    return package_folder(config, CODEX, limit=INSTALL_LIMIT)


def run_node(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".mjs", encoding="utf-8") as script:
        script.write(code)  # node looks for packages beside the script
        script.flush()
        return subprocess.run(["node", script.name], capture_output=True, text=True, timeout=120)


def run_codex(command: str, folder: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """With a home of its own, so that nobody's settings or sessions are touched."""
    workdir = home / "work"
    workdir.mkdir()
    command = command.replace("npx codex", str(folder / "node_modules" / ".bin" / "codex"))
    return subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=workdir,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"CODEX_HOME": str(home)},
    )
