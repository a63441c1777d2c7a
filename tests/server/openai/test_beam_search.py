"""Beam search through chat and completions, over a model of which the next bytes are known."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quire.types.outputs import EngineOutput
from quire.types.step import TokenLogprobs
from tests.frontend.fake_client import EOS, FakeClient, Running
from tests.server.helpers import serving

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}


class Alphabet(FakeClient):
    """After any text "a" is likeliest, then "b", "c", ...; after "b" the output ends most of the time."""

    def _step(self, running: Running) -> EngineOutput:
        request = running.request
        count = request.params.logprobs  # type: ignore[union-attr]
        assert count is not None
        letters = [ord("a") + n for n in range(count)]
        tokens = [EOS, *letters][:count] if request.token_ids[-1] == ord("b") else letters
        logprobs = [-0.5 - n for n in range(count)]
        del self._running[request.request_id]
        entry = TokenLogprobs([tokens[0], *tokens], [logprobs[0], *logprobs], 1)
        return EngineOutput(request.request_id, tokens[:1], "length", None, [entry], None, 0)


def texts(answer: dict[str, Any]) -> list[str]:
    return [
        choice["text"] if "text" in choice else choice["message"]["content"]
        for choice in sorted(answer["choices"], key=lambda choice: choice["index"])
    ]


async def test_the_best_beams_are_the_choices() -> None:
    beams = {"use_beam_search": True, "n": 2, "beam_width": 3, "length_penalty": 0.0}
    async with serving(Alphabet()) as session:
        chat = (await session.post("/v1/chat/completions", json={**CHAT, **beams})).json()
        body = {"prompt": ["Hi", "Ho"], "max_tokens": 3, "logprobs": 1, **beams}
        completion = (await session.post("/v1/completions", json=body)).json()
    assert texts(chat) == ["aaa", "b"]
    assert texts(completion) == ["aaa", "b", "aaa", "b"]
    assert [choice["finish_reason"] for choice in chat["choices"]] == ["length", "stop"]
    assert chat["usage"]["completion_tokens"] == 5
    assert completion["choices"][1]["logprobs"]["token_logprobs"] == [-1.5, -0.5]
    assert completion["choices"][0]["logprobs"]["top_logprobs"][0] == {"a": -0.5}


@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stream_has_them_at_the_end(url: str) -> None:
    prompt = CHAT if "chat" in url else {"prompt": "Hi", "max_tokens": 3}
    async with serving(Alphabet()) as session:
        answer = await session.post(url, json={**prompt, "use_beam_search": True, "n": 2, "stream": True})
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    said = {0: "", 1: ""}
    for choice in (choice for event in events for choice in msgspec.json.decode(event)["choices"]):
        said[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    assert said[0] == "aaa"
    assert answer.text.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", "x"),
        ("logit_bias", {"5": 1}),
        ("structured_outputs", {"regex": "x"}),
        ("repetition_penalty", 2.0),
        ("prompt_logprobs", 1),
        ("length_penalty", 1e9),
        ("beam_width", 1),
        ("beam_width", 100_000),
    ],
)
async def test_what_a_search_would_not_obey_is_refused_by_name(field: str, value: Any) -> None:
    async with serving(Alphabet()) as session:
        body = {**CHAT, "use_beam_search": True, "n": 2, field: value}
        refused = await session.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == field


async def test_a_search_does_not_echo_log_probabilities() -> None:
    """Though it echoes: the refusal names what was sent, not the field that the echo would have to set."""
    body = {"prompt": "Hi", "max_tokens": 3, "use_beam_search": True, "echo": True}
    async with serving(Alphabet()) as session:
        assert texts((await session.post("/v1/completions", json=body)).json()) == ["Hiaaa"]
        refused = (await session.post("/v1/completions", json={**body, "logprobs": 1})).json()["error"]
    assert refused["param"] == "echo"
    assert "prompt_logprobs" not in refused["message"]


@pytest.mark.parametrize("field", [{"length_penalty": 1.5}, {"beam_width": 4}])
async def test_fields_of_a_search_need_one(field: dict[str, Any]) -> None:
    async with serving(Alphabet()) as session:
        refused = await session.post("/v1/completions", json={"prompt": "Hi", **field})
    assert refused.status_code == 400
    assert "use_beam_search" in refused.text
