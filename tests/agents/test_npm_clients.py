"""The JavaScript clients and the commands of docs/guides/agents.md against a live server, as the page prints them."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.agents.scripted import ANSWER, minimal_environment, pointed_at, scripted_server, section
from tests.server.helpers import live_server
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
CLAUDE = "@anthropic-ai/claude-code@2.1.325"
OPENCODE = "opencode-ai@1.18.33"
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


@pytest.mark.nightly
def test_claude_completes_a_turn(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    with scripted_server() as server:
        done = run_claude(server.url, pytestconfig, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert ANSWER in done.stdout
    assert len(server.client.added) >= 2  # it called a tool and went on
    assert max(len(request.token_ids) for request in server.client.added) > 30_000  # bytes: all its tools were there


@pytest.mark.nightly
def test_claude_knows_a_prompt_that_is_too_long(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    with live_server() as server:
        done = run_claude(server.url, pytestconfig, tmp_path)
    assert done.returncode != 0
    assert "Prompt is too long" in done.stdout, done.stdout


@pytest.mark.nightly
def test_opencode_completes_a_turn(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    folder = package_folder(pytestconfig, OPENCODE, limit=INSTALL_LIMIT)
    with scripted_server() as server:
        settings = pointed_at(section("opencode run", "json"), server.url)
        (tmp_path / "opencode.json").write_text(settings, encoding="utf-8")
        command = on_page(section("opencode run", "bash"), "opencode", folder)
        done = run_command(command, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert ANSWER in done.stdout
    assert len(server.client.added) >= 2


def run_claude(url: str, config: pytest.Config, home: Path) -> subprocess.CompletedProcess[str]:
    folder = package_folder(config, CLAUDE, limit=INSTALL_LIMIT)
    return run_command(on_page(pointed_at(section("claude -p", "bash"), url), "claude", folder), home)


def on_page(command: str, program: str, folder: Path) -> str:
    """The page's command with the program that was installed."""
    assert f"npx {program} " in command
    return command.replace(f"npx {program}", str(folder / "node_modules" / ".bin" / program))


def run_command(command: str, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=home,
        stdin=subprocess.DEVNULL,
        env=minimal_environment(home),
    )


def npm_folder(config: pytest.Config) -> Path:
    return package_folder(config, *PACKAGES, limit=INSTALL_LIMIT)


def codex_folder(config: pytest.Config) -> Path:
    return package_folder(config, CODEX, limit=INSTALL_LIMIT)


def run_node(code: str, folder: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".mjs", encoding="utf-8") as script:
        script.write(code)  # node looks for packages beside the script
        script.flush()
        return subprocess.run(["node", script.name], capture_output=True, text=True, timeout=timeout)


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
