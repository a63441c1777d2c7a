"""The Python clients of docs/agents.md against a live server, each as the page prints it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agents.scripted import ANSWER, pointed_at, scripted_server, section

# Title on the page, package it imports, and how often the model's answer is printed.
CLIENTS = [
    ("openai", "openai", 2),
    ("openai-agents", "agents", 1),
    ("anthropic", "anthropic", 2),
    ("langchain-openai and langchain-anthropic", "langchain_openai", 2),
    ("litellm", "litellm", 3),
]


@pytest.mark.parametrize(("title", "package", "times"), CLIENTS, ids=[client[1] for client in CLIENTS])
def test_the_client_works_as_printed(title: str, package: str, times: int, tmp_path: Path) -> None:
    with scripted_server() as server:
        done = run_python(pointed_at(section(title, "python"), server.url), package, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(ANSWER) == times, done.stdout


def run_python(code: str, package: str, folder: Path) -> subprocess.CompletedProcess[str]:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}; pip install -e '.[agents]'")
    script = folder / "client.py"
    script.write_text(code, encoding="utf-8")
    # litellm asks the network for a list of prices when it is imported, unless it is told to use its own.
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, env=environment)
