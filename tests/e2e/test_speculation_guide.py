"""docs/guides/speculation.md works as printed: on the default model, with its flag and without it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from quire.cli.main import build_parser
from tests.e2e.serving import Running, start
from tests.metrics.scrape import Scrape

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "speculation.md"
TEXT = PAGE.read_text(encoding="utf-8")
CLIENT, PYTHON = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.M | re.S)
COMMANDS = [shlex.split(line) for line in re.findall(r"^\$ (.*)$", TEXT, flags=re.M)]
ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def ngram_server() -> Iterator[Running]:
    command = next(command for command in COMMANDS if "--speculative-config" in command)
    assert command[:2] == ["quire", "serve"]
    running = start(*command[2:], "--max-model-len", "1024", "--kv-cache-memory", "64MiB")
    yield running
    assert running.stop() == 0, "".join(running.log)


def follow(url: str, capsys: pytest.CaptureFixture[str]) -> tuple[str, int, int]:
    """The answer that the page's client prints, and the predicted tokens that held and that did not."""
    exec(compile(CLIENT.replace(ADDRESS, url), str(PAGE), "exec"), {})
    *answer, counts = capsys.readouterr().out.splitlines()
    accepted, rejected = map(int, re.findall(r"\d+", counts))
    return "\n".join(answer), accepted, rejected


def test_a_prediction_needs_no_flag(
    default_server: Running, ngram_server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    answer, accepted, _ = follow(default_server.url, capsys)
    again, accepted_again, _ = follow(ngram_server.url, capsys)
    assert answer == again
    assert "a sunny day in the forest" in answer
    assert accepted > 0
    assert accepted_again > 0


def test_drafts_are_counted_and_change_nothing(ngram_server: Running) -> None:
    """Streams too, and stops inside of drafts: text, usage and finish reasons are those without."""
    text = "alpha beta gamma delta epsilon zeta " * 6
    with httpx.Client(base_url=ngram_server.url, timeout=120) as client:

        def ask(**fields: object) -> dict[str, object]:
            body = {"prompt": text, "max_tokens": 40, "temperature": 0, **fields}
            found = client.post("/v1/completions", json=body).json()
            (choice,) = found["choices"]
            return {"usage": found["usage"], **{name: choice[name] for name in ("text", "finish_reason", "logprobs")}}

        def stream(**fields: object) -> dict[str, object]:
            body = {"prompt": text, "max_tokens": 40, "temperature": 0, **fields}
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            said, usage, reasons = "", None, []
            with client.stream("POST", "/v1/completions", json=body) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        chunk = json.loads(line.removeprefix("data: "))
                        usage = chunk.get("usage") or usage
                        for choice in chunk["choices"]:
                            said += choice["text"]
                            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            (reason,) = reasons
            return {"usage": usage, "text": said, "finish_reason": reason}

        for fields in ({}, {"stop": ["delta"]}, {"max_tokens": 7}, {"logprobs": 2}, {"temperature": 0.8, "seed": 5}):
            assert ask(**fields)["text"] == ask(**fields, speculate=False)["text"]
            assert "accepted_prediction_tokens" not in str(ask(**fields)["usage"]), "nothing was predicted"
            plain = _counted(ask(**fields, speculate=False))
            assert _counted(ask(**fields)) == plain
            assert _counted(stream(**fields)) == {name: plain[name] for name in ("usage", "text", "finish_reason")}
        metrics = Scrape(client.get("/metrics").text)
    drafted = metrics.get("spec_decode_num_draft_tokens_total")
    accepted = metrics.get("spec_decode_num_accepted_tokens_total")
    assert drafted >= accepted > 0
    assert metrics.get("spec_decode_num_accepted_tokens_per_pos_total", position="0") <= accepted


def _counted(answer: dict[str, object]) -> dict[str, object]:
    """Without what depends on requests before it: the number of cached tokens."""
    usage = answer["usage"]
    assert isinstance(usage, dict)
    return {**answer, "usage": {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}}


def test_the_python_example(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(PYTHON, str(PAGE), "exec"), {})
    assert "Wednesday" in capsys.readouterr().out


def test_the_commands_have_flags_that_there_are() -> None:
    for command in COMMANDS:
        assert command[0] == "quire"
        build_parser(command[1]).parse_args(command[1:])
