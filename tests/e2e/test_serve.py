"""`quire serve` as a user runs it: real processes, the default model, the openai client and curl."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import ollama
import openai
import pytest

from tests.e2e.serving import Running
from tests.server.npm import talk

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def server(default_server: Running) -> Running:
    return default_server


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


def test_ollamas_api_says_what_openais_says(server: Running, client: openai.OpenAI) -> None:
    fields = {"temperature": 0.8, "seed": 3, "top_k": 20}
    wanted = client.chat.completions.create(
        model="smollm2", messages=QUESTION, max_tokens=12, temperature=0.8, seed=3, extra_body={"top_k": 20}
    )
    with closing(ollama.Client(server.url)) as session:
        answer = session.chat("smollm2", QUESTION, options={**fields, "num_predict": 12})
        streamed = session.chat("smollm2:latest", QUESTION, options={**fields, "num_predict": 12}, stream=True)
        text = wanted.choices[0].message.content
        assert answer.message.content == "".join(part.message.content or "" for part in streamed) == text
        assert wanted.usage is not None
        assert (answer.prompt_eval_count, answer.eval_count) == (
            wanted.usage.prompt_tokens,
            wanted.usage.completion_tokens,
        )
        (entry,) = session.list().models
        assert entry.details is not None
        assert (entry.details.format, entry.details.quantization_level) == ("gguf", "Q4_1")
        assert entry.details.parameter_size == "134.5M"
        served = client.models.retrieve("smollm2").model_extra or {}
        assert (session.show("smollm2").modelinfo or {})["llama.context_length"] == served["max_model_len"]


def test_a_prompt_is_scored_by_echo(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="smollm2", prompt="The sea is", echo=True, logprobs=0, max_tokens=0)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "The sea is"
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == "The sea is"
    assert all(value is not None and value < 0 for value in (logprobs.token_logprobs or [])[1:])


def test_models_helpers_and_errors(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2"]
    assert client.models.retrieve("smollm2").owned_by == "quire"
    fields = {"model": "smollm2", "messages": QUESTION, "temperature": 0, "max_tokens": 8}
    whole = client.chat.completions.create(**fields, n=2, logprobs=True, top_logprobs=2)
    with client.chat.completions.stream(**fields) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert {text, final.choices[0].message.content} == {choice.message.content for choice in whole.choices}
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert "".join(token.token for token in choice.logprobs.content).startswith(text)
        # Greedy: the token that was chosen is the likeliest one.
        assert all(token.token == token.top_logprobs[0].token for token in choice.logprobs.content)
    with pytest.raises(openai.NotFoundError, match="smollm2"):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=-1)
    assert refused.value.param == "temperature"


def test_the_npm_client(server: Running, pytestconfig: pytest.Config) -> None:
    heard = talk(pytestconfig, server.url)
    assert heard["models"] == ["smollm2"]
    assert heard["chat"] == [heard["streamed"]] * 2
    assert heard["helper"] == heard["streamed"] != ""
    assert heard["tokens"] == heard["usage"] <= 16
    assert heard["completion"].startswith("a")
    assert heard["errors"] == [["NotFoundError", "model"], ["BadRequestError", "temperature"]]


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
