"""The table of fields: an endpoint honours a field, accepts it as a hint, or refuses it by name; it drops none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from quire.server.anthropic.handler import HINTS as MESSAGES_HINTS
from quire.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from quire.server.generation.field_table import ACCEPTED, ELSEWHERE, NO_EFFECT_ON_PROMPTS, RENAMED, UNSUPPORTED
from quire.server.ollama.handler import HINTS as OLLAMA_HINTS
from quire.server.ollama.protocol import ChatRequest as OllamaChatRequest
from quire.server.ollama.protocol import EmbeddingsRequest as OllamaEmbeddingsRequest
from quire.server.ollama.protocol import EmbedRequest as OllamaEmbedRequest
from quire.server.ollama.protocol import GenerateRequest as OllamaGenerateRequest
from quire.server.ollama.protocol import Options
from quire.server.openai.chat.protocol import ChatCompletionRequest
from quire.server.openai.completions.protocol import CompletionRequest
from quire.server.openai.embeddings.protocol import EmbeddingsRequest
from quire.server.openai.invocations import PromptRequest
from quire.server.openai.responses.prepare import HINTS as RESPONSES_HINTS
from quire.server.openai.responses.protocol import ResponsesRequest
from quire.server.pooling.protocol import ClassifyRequest, PoolingRequest, RerankRequest, ScoreRequest
from quire.server.tokenize import DetokenizeRequest, TokenizeChat, TokenizeText
from quire.types.request import EngineRequest
from quire.types.sampling import RepetitionDetectionParams, SamplingParams
from quire.types.structured import GrammarSource
from tests.frontend.fake_client import ClassifyingClient, FakeClient, PoolingClient
from tests.server.helpers import serving

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}

# Each endpoint with a body: its model, the least body it takes, and what it accepts without effect.
ENDPOINTS: dict[str, tuple[str, type[BaseModel], dict[str, Any], frozenset[str]]] = {
    "chat": (CHAT, ChatCompletionRequest, HELLO, frozenset()),
    "completions": (COMPLETIONS, CompletionRequest, {"prompt": "Hi"}, frozenset()),
    "responses": (RESPONSES, ResponsesRequest, {"input": "Hi"}, RESPONSES_HINTS),
    "messages": (MESSAGES, MessagesRequest, {**HELLO, "max_tokens": 16}, MESSAGES_HINTS),
    "count_tokens": (f"{MESSAGES}/count_tokens", CountTokensRequest, HELLO, MESSAGES_HINTS | NO_EFFECT_ON_PROMPTS),
    "tokenize": ("/tokenize", TokenizeText, {"prompt": "Hi"}, NO_EFFECT_ON_PROMPTS),
    "tokenize chat": ("/tokenize", TokenizeChat, HELLO, NO_EFFECT_ON_PROMPTS),
    "embeddings": ("/v1/embeddings", EmbeddingsRequest, {"input": "Hi"}, frozenset()),
    "pooling": ("/pooling", PoolingRequest, {"input": "Hi"}, frozenset()),
    "classify": ("/classify", ClassifyRequest, {"input": "Hi"}, frozenset()),
    "score": ("/score", ScoreRequest, {"text_1": "Hi", "text_2": "you"}, frozenset()),
    "rerank": ("/rerank", RerankRequest, {"query": "Hi", "documents": ["you"]}, frozenset()),
    "detokenize": ("/detokenize", DetokenizeRequest, {"tokens": [72]}, NO_EFFECT_ON_PROMPTS),
    "input_tokens": (f"{RESPONSES}/input_tokens", ResponsesRequest, {"input": "Hi"}, RESPONSES_HINTS),
    "chat render": (f"{CHAT}/render", ChatCompletionRequest, HELLO, frozenset()),
    "completions render": (f"{COMPLETIONS}/render", CompletionRequest, {"prompt": "Hi"}, frozenset()),
    "invocations chat": ("/invocations", ChatCompletionRequest, HELLO, frozenset()),
    "invocations completions": ("/invocations", PromptRequest, {"prompt": "Hi"}, frozenset()),
    "ollama chat": ("/api/chat", OllamaChatRequest, HELLO, OLLAMA_HINTS),
    "ollama generate": ("/api/generate", OllamaGenerateRequest, {"prompt": "Hi"}, OLLAMA_HINTS),
    "ollama embed": ("/api/embed", OllamaEmbedRequest, {"input": "Hi"}, OLLAMA_HINTS),
    "ollama embeddings": ("/api/embeddings", OllamaEmbeddingsRequest, {"prompt": "Hi"}, OLLAMA_HINTS),
}
GENERATING = [name for name in ENDPOINTS if ENDPOINTS[name][0] in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)]
HONOURED = {field for _, model, _, _ in ENDPOINTS.values() for field in model.model_fields}
KNOWN = HONOURED | UNSUPPORTED.keys() | RENAMED.keys() | ELSEWHERE.keys()
MATTERS = {"something": "that matters"}


def test_every_field_that_one_endpoint_honours_has_a_line_for_the_others() -> None:
    everywhere = set.intersection(*(set(model.model_fields) for _, model, _, _ in ENDPOINTS.values()))
    table = UNSUPPORTED.keys() | RENAMED.keys() | ELSEWHERE.keys() | ACCEPTED
    assert everywhere == {"model"}
    assert HONOURED - everywhere - table == set()


def test_what_only_python_calls_may_ask_for_is_refused() -> None:
    """All of SamplingParams is a field of a request, refused by name, or set by the server itself."""
    fields = ChatCompletionRequest.model_fields.keys() | UNSUPPORTED.keys()
    own = {"detokenize", "output_kind", "bad_words_token_ids", "thinking_marks", "extra_args"}
    assert set(SamplingParams.__struct_fields__) - fields == own


def test_no_field_is_both_supported_and_not() -> None:
    assert HONOURED & (UNSUPPORTED.keys() | RENAMED.keys()) == set()
    assert len(UNSUPPORTED.keys() | RENAMED.keys() | ELSEWHERE.keys() | ACCEPTED) == sum(
        map(len, (UNSUPPORTED, RENAMED, ELSEWHERE, ACCEPTED))
    )
    assert ELSEWHERE.keys() <= HONOURED, "a line that no endpoint needs"


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_what_an_endpoint_does_not_honour_it_refuses_by_name(endpoint: str) -> None:
    url, model, body, accepted = ENDPOINTS[endpoint]
    # Where two kinds of bodies are taken, the other's prompt makes it the other kind.
    others = sorted(KNOWN - model.model_fields.keys() - ACCEPTED - accepted)
    if url in ("/tokenize", "/invocations"):
        others.remove("prompt" if "messages" in body else "messages")
    pooling = ("embeddings", "pooling", "score", "rerank", "ollama embed", "ollama embeddings")
    pools = {"classify": ClassifyingClient("a"), **dict.fromkeys(pooling, PoolingClient())}
    async with serving(pools.get(endpoint, FakeClient("x"))) as session:
        for name in others:
            refused = await session.post(url, json={**body, name: MATTERS})
            if name == "stream_options":  # every value of it asks for what is done anyway
                assert refused.status_code == 200
                continue
            assert refused.status_code == 400, name
            error = refused.json()["error"]
            message = error if url.startswith("/api/") else error["message"]
            assert message.startswith(f"{name} is not "), refused.text
            if not url.startswith((MESSAGES, "/api/")):
                assert error["param"] == name
            null = await session.post(url, json={**body, name: None})
            assert null.status_code == 200, null.text


@pytest.mark.parametrize("endpoint", [name for name in ENDPOINTS if name.startswith("ollama")])
async def test_options_of_ollama_are_refused_or_logged_like_fields(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    url, _, body, _ = ENDPOINTS[endpoint]
    others = sorted(PROBES.keys() - Options.model_fields.keys())
    assert "logit_bias" in others
    async with serving(PoolingClient() if "embed" in endpoint else FakeClient("x")) as session:
        for name in others:
            refused = await session.post(url, json={**body, "options": {name: PROBES[name][0]}})
            assert refused.status_code == 400, name
            assert f"options.{name} is not a field of {url}" in refused.json()["error"]
        with caplog.at_level(logging.WARNING, logger="quire"):
            taken = await session.post(url, json={**body, "options": {"num_gpu": 1, "mystery": 2}})
    assert taken.status_code == 200, taken.text
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"ignoring the unknown field 'options.mystery' of {url}; said once"]


async def test_a_field_with_another_name_now_is_refused_with_it() -> None:
    async with serving() as session:
        for name, (instead, _) in RENAMED.items():
            refused = await session.post(CHAT, json={**HELLO, name: MATTERS})
            assert instead in refused.json()["error"]["message"]


def params(name: str, value: Any = None) -> Callable[[EngineRequest, Any], bool]:
    """Whether the engine's request has what was sent as a sampling parameter, or another value that it becomes."""

    def check(request: EngineRequest, sent: Any) -> bool:
        assert isinstance(request.params, SamplingParams)
        found = getattr(request.params, name)
        expected = sent if value is None else value
        return bool(found == (tuple(expected) if isinstance(expected, list) else expected))

    return check


# What to send for each field that every generating endpoint honours, and how the engine's request shows it.
PROBES: dict[str, tuple[Any, Callable[[EngineRequest, Any], bool]]] = {
    "temperature": (0.25, params("temperature")),
    "top_p": (0.5, params("top_p")),
    "top_k": (7, params("top_k")),
    "min_p": (0.125, params("min_p")),
    "presence_penalty": (0.5, params("presence_penalty")),
    "frequency_penalty": (0.5, params("frequency_penalty")),
    "repetition_penalty": (1.5, params("repetition_penalty")),
    "repetition_detection": (
        {"max_pattern_size": 4, "min_count": 3},
        params("repetition_detection", RepetitionDetectionParams(max_pattern_size=4, min_count=3)),
    ),
    "seed": (123, lambda request, sent: request.seed == sent),
    "logit_bias": ({"65": 1.5}, params("logit_bias", {65: 1.5})),
    "stop_token_ids": ([66], params("stop_token_ids")),
    "include_stop_str_in_output": (True, params("include_stop_str_in_output")),
    "ignore_eos": (True, params("ignore_eos")),
    "min_tokens": (2, params("min_tokens")),
    "skip_special_tokens": (False, params("skip_special_tokens")),
    "spaces_between_special_tokens": (False, params("spaces_between_special_tokens")),
    "truncate_prompt_tokens": (1, lambda request, sent: len(request.token_ids) == sent),
    "truncation_side": ("right", params("truncation_side")),
    "thinking_token_budget": (7, params("thinking_token_budget")),
    "allowed_token_ids": ([65, 66], params("allowed_token_ids")),
    "bad_words": (["q"], lambda request, _: (ord("q"),) in request.params.bad_words_token_ids),  # type: ignore[union-attr]
    "structured_outputs": (
        {"regex": "x+"},
        lambda request, _: request.grammar == GrammarSource("regex", "x+"),
    ),
    "stream_interval": (3, params("stream_interval")),
    "vllm_xargs": ({"a": [1, "b"]}, params("extra_args")),
    "prediction": (
        {"type": "content", "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]},
        lambda request, _: bytes(request.prediction) == b"abc",
    ),
    "speculate": (False, params("speculate")),
    "priority": (5, lambda request, sent: request.priority == sent),
    "cache_salt": ("salt", lambda request, sent: request.cache_salt == sent),
    "request_id": ("mine-1", lambda request, sent: sent in request.request_id),
}
# Those that are seen in an answer and not in what the engine is asked.
SEEN_ELSEWHERE = {"model", "stop", "stream"}


def test_there_is_a_probe_for_every_field_that_all_generating_endpoints_share() -> None:
    shared = set.intersection(*(set(ENDPOINTS[name][1].model_fields) for name in GENERATING))
    assert shared == PROBES.keys() | SEEN_ELSEWHERE


@pytest.mark.parametrize("endpoint", GENERATING)
async def test_every_generating_endpoint_tells_the_engine_the_session(endpoint: str) -> None:
    url, _, body, _ = ENDPOINTS[endpoint]
    client = FakeClient("x")
    async with serving(client) as session:
        for fields in ({}, {"user": "me"}, {"session_id": 7}, {"session_id": ""}):
            assert (await session.post(url, json={**body, **fields})).status_code == 200
            assert client.added[-1].session == 0
        found = []
        for fields in ({"session_id": "a"}, {"prompt_cache_key": "a"}, {"session_id": "b", "prompt_cache_key": "a"}):
            assert (await session.post(url, json={**body, **fields})).status_code == 200
            found.append(client.added[-1].session)
        assert found[0] == found[1] != found[2]
        assert 0 not in found


@pytest.mark.parametrize("endpoint", GENERATING)
async def test_every_generating_endpoint_honours_the_same_fields(endpoint: str) -> None:
    url, _, body, _ = ENDPOINTS[endpoint]
    client = FakeClient("xq")
    async with serving(client) as session:
        for name, (value, is_honoured) in PROBES.items():
            for stream in (False, True):
                answer = await session.post(url, json={**body, name: value, "stream": stream})
                assert answer.status_code == 200, (name, answer.text)
                assert is_honoured(client.added[-1], value), name
        plain = await session.post(url, json=body)
        stopped = await session.post(url, json={**body, "stop": "q"})
        assert "xq" in plain.text
        assert "xq" not in stopped.text


async def test_messages_stop_at_either_kind_of_stop_strings() -> None:
    client = FakeClient("abc")
    async with serving(client) as session:
        for stop, sequences, text in (("b", ["c"], "a"), (["c"], ["b"], "a"), ("c", [], "ab")):
            body = {**HELLO, "max_tokens": 9, "stop": stop, "stop_sequences": sequences}
            answer = (await session.post(MESSAGES, json=body)).json()
            assert answer["content"][0]["text"] == text
            assert answer["stop_reason"] == "stop_sequence"


@pytest.mark.parametrize("url", [CHAT, RESPONSES, MESSAGES, "/tokenize", f"{MESSAGES}/count_tokens"])
async def test_every_conversation_has_the_same_template_fields(url: str) -> None:
    template = "{{ documents[0].text }}{{ enable }}"
    body: dict[str, Any] = {"input": "Hi"} if url == RESPONSES else dict(HELLO)
    body |= {"max_tokens": 9} if url == MESSAGES else {}
    body |= {"chat_template": template, "chat_template_kwargs": {"enable": "yes"}, "documents": [{"text": "doc"}]}
    client = FakeClient("x")
    async with serving(client, allow_request_chat_template=True) as session:
        answer = (await session.post(url, json=body)).json()
    if url == "/tokenize":
        assert bytes(answer["tokens"]) == b"docyes"
    elif url.endswith("count_tokens"):
        assert answer["input_tokens"] == len("docyes")
    else:
        assert bytes(client.added[0].token_ids) == b"docyes"
    async with serving(client) as session:
        refused = await session.post(url, json=body)
    assert refused.status_code == 400
    assert "--allow-request-chat-template" in refused.text


async def test_tokenize_leaves_out_tools_that_may_not_be_called() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    template = "{{ 'with' if tools else 'without' }}{{ reasoning_effort }}"
    body = {**HELLO, "tools": tools, "chat_template": template, "reasoning_effort": "low"}
    async with serving(FakeClient("x"), allow_request_chat_template=True) as session:
        offered = await session.post("/tokenize", json=body)
        barred = await session.post("/tokenize", json={**body, "tool_choice": "none"})
    assert bytes(offered.json()["tokens"]) == b"withlow"
    assert bytes(barred.json()["tokens"]) == b"withoutlow"


HARMLESS: dict[str, Any] = {
    "functions": [],
    "function_call": "auto",
    "modalities": ["text"],
    "service_tier": "flex",
    "store": True,
    "verbosity": "low",
    "prediction": {"type": "content", "content": "x"},
    "suffix": "",
    "use_beam_search": False,
    "length_penalty": 1.0,
    "best_of": 1,
    "user": "u",
    "metadata": {"a": "b"},
    "safety_identifier": "s",
    "prompt_cache_key": "k",
}


async def test_harmless_values_are_accepted_silently(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(FakeClient("x")) as session:
        response = await session.post(CHAT, json={**HELLO, **HARMLESS})
    assert response.status_code == 200, response.text
    assert "ignoring" not in caplog.text


@pytest.mark.parametrize(
    "field",
    [
        {"functions": [{"name": "f"}]},
        {"function_call": {"name": "f"}},
        {"modalities": ["text", "audio"]},
        {"length_penalty": 1.5},
    ],
)
async def test_values_that_matter_are_refused(field: dict[str, Any]) -> None:
    async with serving() as session:
        response = await session.post(CHAT, json={**HELLO, **field})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter(field))


async def test_an_unknown_field_is_ignored_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="quire"):
        async with serving(FakeClient("x")) as session:
            for value in range(3):
                response = await session.post(CHAT, json={**HELLO, "mystery\n": value})
                assert response.status_code == 200
    assert [record.getMessage() for record in caplog.records] == [
        "ignoring the unknown field 'mystery\\n' of /v1/chat/completions; said once"
    ]


async def test_responses_show_what_the_model_read_and_wrote() -> None:
    client = FakeClient("Hey")
    async with serving(client) as session:
        answer = (await session.post(RESPONSES, json={"input": "Hi", "enable_response_messages": True})).json()
        plain = (await session.post(RESPONSES, json={"input": "Hi"})).json()
    prompt = bytes(client.added[0].token_ids)
    assert answer["input_messages"] == [
        {"type": "raw_message_tokens", "message": prompt.decode(), "tokens": list(prompt)}
    ]
    assert answer["output_messages"][0]["message"] == "Hey</s>"
    assert answer["output_messages"][0]["tokens"][:3] == list(b"Hey")
    assert not {"input_messages", "output_messages", "user"} & plain.keys()


def test_parameters_cross_to_the_engine_as_they_are() -> None:
    sent = SamplingParams(repetition_detection=RepetitionDetectionParams(max_pattern_size=4, min_count=3))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=SamplingParams) == sent
