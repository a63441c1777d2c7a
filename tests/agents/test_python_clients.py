"""The Python clients of docs/guides/agents.md against a live server, each as the page prints it."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

from quire.types.request import EngineRequest
from tests.agents.scripted import ANSWER, answer, pointed_at, scripted_server, section
from tests.server.helpers import live_server, long_client

# Title on the page, package it imports, and how often the model's answer is printed: see test_real_model.py.
CLIENTS = [
    ("openai", "openai", 2),
    ("openai-agents", "agents", 1),
    ("anthropic", "anthropic", 2),
    ("langchain-openai and langchain-anthropic", "langchain_openai", 2),
    ("litellm", "litellm", 3),
]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_instructor_gets_its_objects(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """By a call, and by an answer that is held to a schema. It pins older versions of what others need."""
    python = python_with(pytestconfig, "instructor==1.17.0")

    def city(request: EngineRequest) -> Sequence[int]:
        said = answer(request)
        return said if bytes(said).startswith(b"<tool_call>") else list('{"city": "Köln"}'.encode())

    with live_server(long_client(city)) as server:
        done = run_script(python, pointed_at(section("instructor", "python"), server.url), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["Köln", "Köln"]


OVERFLOW = """
import litellm

litellm.suppress_debug_info = True
text = "word " * 2000
chat, openai = {"messages": [{"role": "user", "content": text}], "max_tokens": 8}, "http://127.0.0.1:8000/v1"
for ask, model, base, question in (
    (litellm.completion, "openai/smollm2", openai, chat),
    (litellm.text_completion, "text-completion-openai/smollm2", openai, {"prompt": text}),
    (litellm.responses, "openai/smollm2", openai, {"input": text}),
    (litellm.completion, "anthropic/smollm2", "http://127.0.0.1:8000", chat),
):
    for stream in (False, True):
        try:
            print("took", [*ask(model=model, api_base=base, api_key="none", stream=stream, **question)])
        except litellm.ContextWindowExceededError:
            print("too long")
"""


def test_litellm_knows_a_prompt_that_is_too_long(tmp_path: Path) -> None:
    with live_server() as server:
        done = run_python(pointed_at(OVERFLOW, server.url), "litellm", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["too long"] * 8


# Frameworks that bring too much for every change: title, what to install, answers printed, least requests.
FRAMEWORKS = [
    ("dspy", ("dspy==3.4.1",), 2, 4),
    ("smolagents", ("smolagents[openai]==1.26.0",), 1, 2),
    ("llama-index", ("llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1"), 2, 3),
]


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("title", "packages", "times", "least"), FRAMEWORKS, ids=[item[0] for item in FRAMEWORKS])
def test_the_framework_works_as_printed(
    title: str, packages: tuple[str, ...], times: int, least: int, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    python = python_with(pytestconfig, *packages)
    with scripted_server() as server:
        done = run_script(python, pointed_at(section(title, "python"), server.url), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(ANSWER) == times, done.stdout
    assert len(server.client.added) >= least  # tools were called, and their results read


def python_with(config: pytest.Config, *packages: str) -> Path:
    """A Python in which packages are installed, kept between runs. Skips the test where they cannot be had."""
    assert config.cache is not None
    folder = config.cache.mkdir(f"python-{hashlib.sha256(' '.join(packages).encode()).hexdigest()[:12]}")
    python, done_mark = folder / "bin" / "python", folder / "installed"
    if not done_mark.is_file():
        venv.create(folder, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--retries", "0", *packages]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode != 0:
            pytest.skip(f"pip cannot install {packages} here, which needs the network: {done.stderr[-200:]}")
        done_mark.touch()
    return python


def run_python(code: str, package: str, folder: Path) -> subprocess.CompletedProcess[str]:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}; pip install -e '.[agents]'")
    return run_script(Path(sys.executable), code, folder)


def run_script(python: Path, code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "client.py"
    script.write_text(code, encoding="utf-8")
    # litellm asks the network for a list of prices when it is imported, unless it is told to use its own.
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return subprocess.run([str(python), str(script)], capture_output=True, text=True, timeout=120, env=environment)
