"""Ollama's API with its own client over loopback, and with plain HTTP where shapes matter."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from pydantic import BaseModel

from quire.server import sse
from quire.types.sampling import PoolingParams, SamplingParams
from tests.frontend.fake_client import FakeClient, PoolingClient
from tests.server.helpers import MODEL, http, live_server, long_client, make_app, serving
from tests.server.openai.responses.test_responses import PARSERS
from tests.server.scripted import ScriptedClient, scripted_app
from tests.server.waiting import WaitingClient

HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


async def ask(path: str, script: str | list[str], **body: Any) -> tuple[list[dict[str, Any]], ScriptedClient]:
    """The lines of the answer to a request, streamed or not, and the client that was asked."""
    app, provider = scripted_app(**PARSERS)
    client = ScriptedClient(script)
    provider.use(client)
    async with http(app) as session:
        response = await session.post(path, json={"model": MODEL, **body})
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()], client


def folded(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """A chat stream's message."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for line in lines:
        assert line["message"]["role"] == "assistant"
        message["content"] += line["message"]["content"]
        if "thinking" in line["message"]:
            message["thinking"] = message.get("thinking", "") + line["message"]["thinking"]
        if "tool_calls" in line["message"]:
            message.setdefault("tool_calls", []).extend(line["message"]["tool_calls"])
    return message


@pytest.mark.parametrize(
    ("script", "more"),
    [
        ("Hi there", {}),
        ("<think>\nLet me see.\n</think>\n\nFine.", {"think": True}),
        (f"I look it up.\n{CALL}\n{CALL}", {"tools": [WEATHER]}),
    ],
)
async def test_a_stream_adds_up_to_the_whole_answer(script: str, more: dict[str, Any]) -> None:
    (whole,), _ = await ask("/api/chat", script, messages=HELLO, stream=False, **more)
    lines, _ = await ask("/api/chat", script, messages=HELLO, **more)
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["message"] == {"role": "assistant", "content": ""}
    message = folded(lines)
    for call in [*message.get("tool_calls", []), *whole["message"].get("tool_calls", [])]:
        assert call.pop("id")
    assert message == whole["message"]
    counted = ("done_reason", "prompt_eval_count", "eval_count")
    assert [lines[-1][name] for name in counted] == [whole[name] for name in counted]
    for name in ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration"):
        assert isinstance(whole[name], int)
        assert whole[name] > 0
    assert whole["total_duration"] >= whole["eval_duration"]


async def test_calls_come_whole_and_results_find_theirs() -> None:
    (answer,), _ = await ask("/api/chat", CALL, messages=HELLO, tools=[WEATHER], stream=False)
    (call,) = answer["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": {"city": "Köln"}, "index": 0}
    assert answer["done_reason"] == "stop"
    # Ollama's clients hand calls back without ids, and results with the tool's name or with nothing.
    calls = [{"function": {"name": name, "arguments": {"city": "Rom"}}} for name in ("weather", "time")]
    results = [{"role": "tool", "tool_name": "time", "content": "9:00"}, {"role": "tool", "content": "Sun"}]
    history = [*HELLO, {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": calls}, *results]
    _, client = await ask("/api/chat", "ok", messages=history, stream=False)
    (prompt,) = client.prompts
    assert 'THOUGHT Hm. CALL weather {"city": "Rom"} CALL time {"city": "Rom"}' in prompt
    assert "[tool]9:00 FOR call_1\n[tool]Sun FOR call_0\n" in prompt


async def test_options_become_sampling_parameters() -> None:
    options = {
        "num_predict": 7,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 5,
        "stop": ["END"],
        "repeat_penalty": 1.25,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "num_ctx": 1 << 30,
        "num_gpu": 1,
        "num_thread": 4,
        "mirostat": 0,
    }
    _, client = await ask("/api/generate", "x", prompt="Hi", options=options)
    params = client.added[0].params
    assert isinstance(params, SamplingParams)
    wanted = {**options, "max_tokens": 7, "repetition_penalty": 1.25}
    for name in SamplingParams.__struct_fields__:
        if name in wanted and name != "stop":
            assert getattr(params, name) == wanted[name]
    for free in ({}, {"num_predict": -1}, {"num_predict": -2}, {"seed": -1}):
        _, client = await ask("/api/generate", "x", prompt="Hi", options=free)
        params = client.added[0].params
        assert isinstance(params, SamplingParams)
        assert params.max_tokens != 64  # the default of completions
        assert params.seed is None


async def test_generate_takes_a_system_message_a_raw_prompt_and_a_suffix() -> None:
    lines, client = await ask("/api/generate", "Yes.", prompt="Hi", system="Be kind.", think=False)
    assert client.prompts == ["[system]Be kind.\n[user]Hi\n[assistant]"]
    assert "".join(line["response"] for line in lines) == "Yes."
    assert "context" in lines[-1]
    lines, client = await ask("/api/generate", "Yes.", prompt="Hi", raw=True)
    assert client.prompts[0].endswith("Hi")
    assert "[user]" not in client.prompts[0]
    assert "context" not in lines[-1]


async def test_a_context_goes_on() -> None:
    lines, first = await ask("/api/generate", "One.", prompt="Count")
    _, second = await ask("/api/generate", "Two.", prompt="More", context=lines[-1]["context"])
    assert second.prompts[0] == f"{first.prompts[0]}One.</s>[user]More\n[assistant]"


async def test_thinking_of_generate_is_apart() -> None:
    lines, _ = await ask("/api/generate", "<think>\nHm.\n</think>\n\nFine.", prompt="Hi", think=True)
    assert "".join(line.get("thinking", "") for line in lines).strip() == "Hm."
    assert "".join(line["response"] for line in lines) == "Fine."


async def test_format_is_enforced_by_a_grammar() -> None:
    for wanted in ("json", {"type": "object"}):
        _, client = await ask("/api/chat", "{}", messages=HELLO, format=wanted)
        assert client.added[0].grammar is not None
    lines, _ = await ask("/api/chat", "[1]", messages=HELLO, format={"type": "array", "uniqueItems": True})
    assert lines[-1]["schema_check"]["valid"] is True
    _, client = await ask("/api/chat", "x", messages=HELLO, format="")
    assert client.added[0].grammar is None


async def test_logprobs() -> None:
    async with serving(FakeClient("Hi")) as session:
        body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "stream": False}
        answer = (await session.post("/api/chat", json=body)).json()
        wrong = await session.post("/api/chat", json=body | {"top_logprobs": 99})
    assert [entry["token"] for entry in answer["logprobs"]] == ["H", "i", "</s>"]
    assert answer["logprobs"][0]["bytes"] == [72]
    assert [len(entry["top_logprobs"]) for entry in answer["logprobs"]] == [2, 2, 2]
    assert wrong.status_code == 400
    assert "top_logprobs is 99" in wrong.json()["error"]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_no_prompt_says_that_the_model_is_loaded(path: str) -> None:
    (line,), client = await ask(path, "x", keep_alive="5m")
    assert (line["done"], line["done_reason"]) == (True, "load")
    assert client.added == []


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/api/chat", {"model": "llama3", "messages": HELLO}, 404, "'llama3' does not exist"),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]},
            400,
            "[0].images is given",
        ),
        ("/api/generate", {"prompt": "x", "images": ["aGk="]}, 400, "images is given"),
        ("/api/generate", {"prompt": "x", "template": "{{ .Prompt }}"}, 400, "template is not taken"),
        ("/api/generate", {"prompt": "x", "context": [1 << 30]}, 400, "context holds 1073741824"),
        ("/api/generate", {"prompt": "x", "think": "hugely"}, 400, "think is 'hugely'"),
        ("/api/generate", {"prompt": "x", "think": True}, 400, "does not support thinking"),
        ("/api/generate", {"prompt": "x", "format": "xml"}, 400, "format is 'xml'"),
        ("/api/generate", {"prompt": "x", "options": {"temperature": -1}}, 400, "options.temperature is -1"),
        ("/api/generate", {"prompt": "x", "options": {"repeat_penalty": 0}}, 400, "options.repeat_penalty is 0"),
        ("/api/generate", {"prompt": "x", "options": {"mirostat": 2}}, 400, "options.mirostat is not supported"),
        ("/api/chat", {"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role is 'robot'"),
        ("/api/embed", {"input": "x"}, 400, "embeddings"),
        ("/api/show", {"name": "llama3"}, 404, "'llama3' does not exist"),
        ("/api/chat", {"messages": "x"}, 400, "messages is 'x'"),
    ],
)
async def test_mistakes_are_named_in_ollamas_form(path: str, body: dict[str, Any], status: int, said: str) -> None:
    async with serving(reasoning_parser="none") as session:
        response = await session.post(path, json=body)
    assert response.status_code == status
    assert response.json().keys() == {"error"}
    assert said in response.json()["error"]


@pytest.mark.parametrize(
    ("method", "path", "command"),
    [
        ("POST", "/api/pull", "quire pull"),
        ("DELETE", "/api/delete", "quire rm"),
        ("POST", "/api/create", "quire quantize"),
        ("POST", "/api/copy", "quire list"),
        ("POST", "/api/push", "pushes models nowhere"),
        ("POST", "/api/blobs/sha256:12", "quire list"),
    ],
)
async def test_models_are_changed_by_the_command_line_alone(method: str, path: str, command: str) -> None:
    async with serving() as session:
        response = await session.request(method, path, content=b'{"model": "x"}')
    assert response.status_code == 404
    assert command in response.json()["error"]


async def test_a_silent_stream_has_empty_lines_of_its_own_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "VERDICT_SECONDS", 0.02)
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.02)
    async with serving(WaitingClient("Hi", seconds=0.1)) as session:
        response = await session.post("/api/chat", json={"messages": HELLO})
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert lines[0]["message"] == {"role": "assistant", "content": ""}
    assert len([line for line in lines if not line["message"]["content"]]) > 2
    assert folded(lines)["content"] == "Hi"


class City(BaseModel):
    name: str


def test_its_own_client() -> None:
    """Every call of the `ollama` package that a server like this can answer."""
    with (
        live_server(ScriptedClient(['{"name": "Rom"}', "Hi there", "Hi there", "Hi there"])) as server,
        ExitStack() as opened,
    ):
        client = opened.enter_context(closing(ollama.Client(server.url)))
        assert [entry.model for entry in client.list().models] == [f"{MODEL}:latest", "alias/name:latest"]
        assert [entry.model for entry in client.ps().models] == [f"{MODEL}:latest", "alias/name:latest"]
        shown = client.show(f"{MODEL}:latest")
        assert shown.capabilities is not None
        assert "completion" in shown.capabilities
        answer = client.chat(f"{MODEL}:latest", HELLO, format=City.model_json_schema(), options={"temperature": 0})
        assert City.model_validate_json(answer.message.content or "") == City(name="Rom")
        assert answer.model == f"{MODEL}:latest"
        assert answer.eval_count == 16  # with the end
        streamed = client.chat(MODEL, HELLO, stream=True, keep_alive="10m")
        assert "".join(part.message.content or "" for part in streamed) == "Hi there"
        assert client.generate(MODEL, "Hello").response == "Hi there"
        parts = list(client.generate(MODEL, "Hello", stream=True, raw=True))
        assert "".join(part.response or "" for part in parts) == "Hi there"
        assert parts[-1].done_reason == "stop"
        with pytest.raises(ollama.ResponseError, match="does not exist") as missing:
            client.chat("llama3", HELLO)
        assert missing.value.status_code == 404
        with pytest.raises(ollama.ResponseError, match="quire pull"):
            client.pull("llama3")
        with pytest.raises(ollama.ResponseError, match="images"):
            client.generate(MODEL, "What is this?", images=[b"\x89PNG"])


async def test_its_asyncio_client_and_tools() -> None:
    def weather(city: str) -> str:
        """The weather.

        Args:
            city: where
        """
        return f"sun in {city}"

    script = [CALL, lambda prompt: "It is sunny." if "sun in Köln" in prompt else "?"]
    with live_server(ScriptedClient(script), **PARSERS) as server:
        client = ollama.AsyncClient(server.url)
        messages: list[Any] = list(HELLO)
        first = await client.chat(MODEL, messages, tools=[weather])
        (call,) = first.message.tool_calls or ()
        assert call.function.arguments == {"city": "Köln"}
        result = weather(**call.function.arguments)
        messages += [first.message, {"role": "tool", "tool_name": "weather", "content": result}]
        last = [part async for part in await client.chat(MODEL, messages, tools=[weather], stream=True)]
        await client.close()
    assert "".join(part.message.content or "" for part in last) == "It is sunny."


def test_embeddings_with_its_own_client() -> None:
    with live_server(PoolingClient()) as server, ExitStack() as opened:
        client = opened.enter_context(closing(ollama.Client(server.url)))
        answer = client.embed(MODEL, ["ab", "abc"], dimensions=2)
        assert [len(vector) for vector in answer.embeddings] == [2, 2]
        assert answer.prompt_eval_count == sum(vector[0] for vector in answer.embeddings)
        assert len(client.embed(MODEL, "ab").embeddings) == 1
        assert client.embed(MODEL, []).embeddings == []
        assert len(client.embeddings(MODEL, "ab").embedding) == 3
        assert client.show(MODEL).capabilities == ["embedding"]
        assert all(isinstance(request.params, PoolingParams) for request in server.client.added)
        with pytest.raises(ollama.ResponseError):
            client.chat(MODEL, HELLO)


async def test_a_key_is_taken_as_ollamas_own_service_has_it() -> None:
    async with http(make_app(api_keys=("secret",))) as session:
        assert (await session.get("/api/tags")).status_code == 401
        assert (await session.get("/api/tags", headers={"authorization": "Bearer secret"})).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None, "application/json"])
async def test_bodies_of_any_type_are_taken_from_no_page_or_our_own(kind: str | None) -> None:
    """curl sends forms; a page of another origin may send all but JSON without asking."""
    headers = {} if kind is None else {"content-type": kind}
    body = json.dumps({"model": MODEL, "messages": HELLO, "stream": False}).encode()
    async with serving(allowed_origins=("http://friend.example",)) as session:

        async def post(**more: str) -> httpx.Response:
            return await session.post("/api/chat", content=body, headers=headers | more)

        for origin in (None, "http://quire", "http://friend.example"):
            assert (await post(**({} if origin is None else {"origin": origin}))).status_code == 200
        for origin in ("http://evil.example", "null", "https://quire.evil.example"):
            refused = await post(origin=origin)
            assert refused.status_code == 403
            assert "--allowed-origins" in refused.json()["error"]
        rebound = await post(host="evil.example", origin="http://evil.example")
        assert rebound.status_code == 403
        assert "--allowed-hosts" in rebound.json()["error"]


# What Open WebUI 0.12.4 sent to this server when its API was asked for chats with sampling settings and tools, for
# titles, tags and embeddings, as a layer in front of the app noted it down. The texts of its task prompts are cut.
WEBUI = json.loads((Path(__file__).parent / "open_webui.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("sent", WEBUI, ids=lambda sent: f"{sent['method']} {sent['path']}")
async def test_requests_of_open_webui(sent: dict[str, Any]) -> None:
    embeds = "embed" in sent["path"]
    async with serving(PoolingClient() if embeds else long_client("Hi"), tool_call_parser="hermes") as session:
        response = await session.request(sent["method"], sent["path"], json=sent["body"], headers=sent["headers"])
    assert response.status_code == 200, response.text
    last = json.loads(response.text.splitlines()[-1])
    assert last.get("done", True) is True
    assert not embeds or last.keys() & {"embedding", "embeddings"}
