"""`quire serve` as a user runs it: real processes, the default model, the openai client and curl."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass
class Running:
    process: subprocess.Popen[str]
    url: str
    reader: threading.Thread

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=60)
        self.reader.join(timeout=60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def start(*flags: str) -> Running:
    """Start a server and read its log until it is ready."""
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--max-model-len", "512", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    log: list[str] = []
    for line in process.stdout:
        log.append(line)
        found = re.search(r"serving on (http://\S+), ready", line)
        if found:
            # Somebody has to go on reading, or the server would wait for room in the pipe.
            reader = threading.Thread(target=lambda: log.extend(process.stdout or ()), daemon=True)
            reader.start()
            return Running(process, found[1], reader)
    raise AssertionError("".join(log))


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    running = start()
    yield running
    assert running.stop() == 0


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as session:
        yield session


def test_an_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=16)
    assert "Paris" in (answer.choices[0].message.content or "")


def test_streams_equal_bodies_and_hit_the_prefix_cache(client: openai.OpenAI) -> None:
    for seed in (1, 2):
        fields = {
            "model": "smollm2",
            "messages": QUESTION,
            "seed": seed,
            "max_tokens": 12,
            "stop": ["France", "Lyon"],
        }
        whole = client.chat.completions.create(**fields, n=2)
        stream = client.chat.completions.create(**fields, n=2, stream=True)
        texts = ["", ""]
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == [choice.message.content for choice in whole.choices]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens


def test_a_prompt_is_scored_by_echo(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="smollm2", prompt="The sea is", echo=True, logprobs=0, max_tokens=0)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "The sea is"
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == "The sea is"
    assert all(value is not None and value < 0 for value in (logprobs.token_logprobs or [])[1:])


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl; install it")
def test_curl_reads_the_events(server: Running) -> None:
    body = json.dumps({"prompt": "The sea is", "stream": True, "max_tokens": 3})
    command = ["curl", "-sSN", f"{server.url}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    *events, last, end = done.stdout.split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    assert all(json.loads(event.removeprefix("data: "))["choices"] for event in events)


def test_the_readme_snippets_work_as_printed(server: Running) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    python = re.search(r"```python\n(from openai.*?)```", readme, flags=re.S)
    curl = re.search(r"^\$ (curl .*)$", readme, flags=re.M)
    assert python is not None
    assert curl is not None
    for command in ([sys.executable, "-c", python[1]], ["bash", "-c", curl[1]]):
        here = [part.replace("http://127.0.0.1:8000", server.url) for part in command]
        done = subprocess.run(here, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
