"""Each client of docs/guides/agents.md takes its turns on a real `quire serve` with a real model, as printed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents.real_model import GREETING, write_model
from tests.agents.scripted import ANSWER, pointed_at, scripted_server, section
from tests.agents.test_npm_clients import CLIENTS as NPM_CLIENTS
from tests.agents.test_npm_clients import codex_folder, npm_folder, run_codex, run_node
from tests.agents.test_python_clients import CLIENTS as PYTHON_CLIENTS
from tests.agents.test_python_clients import run_python
from tests.e2e.serving import Running, start

MODEL = "greeter"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = write_model(tmp_path_factory.mktemp("model"))
    running = start(str(folder), "--served-model-name", MODEL)
    yield running
    assert running.stop() == 0, "".join(running.log)


def assert_clean(done: subprocess.CompletedProcess[str], times: int) -> None:
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(GREETING) == times, done.stdout


@pytest.mark.parametrize(("title", "package", "times"), PYTHON_CLIENTS, ids=[client[1] for client in PYTHON_CLIENTS])
def test_a_python_client_takes_its_turns(
    title: str, package: str, times: int, server: Running, tmp_path: Path
) -> None:
    """And again in the same process, since importing a client takes seconds: with a model that calls its tool."""
    page = section(title, "python")
    with scripted_server() as scripted:
        code = [pointed_at(page, server.url, MODEL), 'print("-----")', pointed_at(page, scripted.url)]
        done = run_python("\n".join(code), package, tmp_path)
    assert_clean(done, times)
    assert done.stdout.partition("-----")[2].count(ANSWER) == times, done.stdout


@pytest.mark.parametrize(("title", "times"), NPM_CLIENTS, ids=[title for title, _ in NPM_CLIENTS])
def test_a_javascript_client_takes_its_turns(
    title: str, times: int, server: Running, pytestconfig: pytest.Config
) -> None:
    code = pointed_at(section(title, "javascript"), server.url, MODEL)
    assert_clean(run_node(code, npm_folder(pytestconfig)), times)


def test_codex_takes_a_turn(server: Running, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    command = pointed_at(section("codex exec", "bash"), server.url, MODEL)
    done = run_codex(command, codex_folder(pytestconfig), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert GREETING in done.stdout
