"""The requests of benchmarks/soak.py: ordinary ones of every kind, and hostile ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

# How a client behaves: reads all, leaves in mid-stream, leaves in mid-body, or reads a byte now and then.
Manner = Literal["reads", "leaves", "half-sends", "dawdles"]

WORDS = ("why", "is", "the", "sky", "blue", "and", "what", "can", "trees", "say", "of", "seven", "old", "bridges")
TOOLS = [
    {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
    {"name": "add", "description": "Add numbers", "parameters": {"type": "object", "properties": {}}},
]
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"


@dataclass(frozen=True)
class Request:
    kind: str
    path: str
    body: bytes
    manner: Manner = "reads"
    hostile: bool = False
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": "application/json"})
    raw: bytes | None = None
    """Instead of an HTTP request: what is sent as it is."""

    @property
    def streams(self) -> bool:
        return b'"stream": true' in self.body


@dataclass(frozen=True)
class Sizes:
    """How long prompts and answers are."""

    prompts: int  # different ones
    tokens: int  # most of an answer
    long_tokens: int  # of an answer that its client will not wait for
    context: int


Make = Callable[[random.Random, Sizes], Request]


def _prompt(draw: random.Random, sizes: Sizes) -> str:
    """One of a fixed number, so that some are in the prefix cache."""
    number = draw.randrange(sizes.prompts)
    return f"{number} " + " ".join(random.Random(number).choices(WORDS, k=3 + number % 4))


def _tokens(draw: random.Random, sizes: Sizes) -> int:
    return draw.randint(1, sizes.tokens)


def _sampling(draw: random.Random) -> dict[str, Any]:
    choices: list[dict[str, Any]] = [
        {},
        {"temperature": 0},
        {"temperature": 0.8, "top_p": 0.9, "seed": draw.randrange(1000)},
        {"temperature": 1.0, "top_k": 20, "min_p": 0.05},
        {"frequency_penalty": 0.5, "presence_penalty": 0.2},
        {"logit_bias": {"100": -5, "200": 3}},
    ]
    return draw.choice(choices)


def _chat(kind: str, draw: random.Random, sizes: Sizes, **fields: Any) -> Request:
    messages = [{"role": "user", "content": _prompt(draw, sizes)}]
    if draw.random() < 0.2:
        messages = [{"role": "system", "content": "Be brief."}, *messages]
    body = {"messages": messages, "max_tokens": _tokens(draw, sizes), **fields}
    return Request(kind, CHAT, json.dumps(body).encode())


def chat(draw: random.Random, sizes: Sizes) -> Request:
    return _chat("chat", draw, sizes, **_sampling(draw))


def chat_stream(draw: random.Random, sizes: Sizes) -> Request:
    options = draw.choice([{}, {"stream_options": {"include_usage": True}}])
    return _chat("chat, streamed", draw, sizes, stream=True, **options, **_sampling(draw))


def chat_logprobs(draw: random.Random, sizes: Sizes) -> Request:
    stream = draw.random() < 0.5
    return _chat("chat, logprobs", draw, sizes, logprobs=True, top_logprobs=draw.randrange(6), stream=stream)


def chat_tools(draw: random.Random, sizes: Sizes) -> Request:
    tools = [{"type": "function", "function": tool} for tool in TOOLS]
    choice = draw.choice(["auto", "auto", "none", "required"])
    stream = draw.random() < 0.5
    return _chat("chat, tools", draw, sizes, tools=tools, tool_choice=choice, stream=stream)


def _schema(draw: random.Random) -> dict[str, Any]:
    """One of many, so that compiled grammars are not all kept."""
    number = draw.randrange(300)
    properties = {"answer": {"type": "integer"}, f"field_{number}": {"type": "string", "maxLength": 4}}
    return {"type": "object", "properties": properties, "required": ["answer"], "additionalProperties": False}


def chat_schema(draw: random.Random, sizes: Sizes) -> Request:
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": _schema(draw)}}
    return _chat("chat, schema", draw, sizes, response_format=form, stream=draw.random() < 0.5)


def chat_abort(draw: random.Random, sizes: Sizes) -> Request:
    made = _chat("chat, aborted", draw, sizes, stream=True, max_tokens=sizes.long_tokens, ignore_eos=True)
    return Request(made.kind, made.path, made.body, "leaves")


def _completion(kind: str, draw: random.Random, sizes: Sizes, **fields: Any) -> Request:
    body = {"prompt": _prompt(draw, sizes), "max_tokens": _tokens(draw, sizes), **fields}
    return Request(kind, COMPLETIONS, json.dumps(body).encode())


def completion(draw: random.Random, sizes: Sizes) -> Request:
    return _completion("completion", draw, sizes, **_sampling(draw))


def completion_stream(draw: random.Random, sizes: Sizes) -> Request:
    return _completion("completion, streamed", draw, sizes, stream=True, **_sampling(draw))


def completion_many(draw: random.Random, sizes: Sizes) -> Request:
    several = draw.choice([{"n": draw.randint(2, 4)}, {"prompt": ["one", "two", _prompt(draw, sizes)]}])
    return _completion("completion, n > 1", draw, sizes, temperature=1.0, stream=draw.random() < 0.5, **several)


def completion_stop(draw: random.Random, sizes: Sizes) -> Request:
    stop = draw.choice(["STOP", [".", "\n"], ["e", "waves"], "Köln"])
    return _completion("completion, stop strings", draw, sizes, stop=stop, stream=draw.random() < 0.5)


def completion_logprobs(draw: random.Random, sizes: Sizes) -> Request:
    echo = draw.random() < 0.3
    return _completion("completion, logprobs", draw, sizes, logprobs=draw.randrange(5), echo=echo)


def completion_structured(draw: random.Random, sizes: Sizes) -> Request:
    given = draw.choice([{"regex": "[a-z]{1,3}[0-9]"}, {"choice": ["yes", "no"]}, {"json": _schema(draw)}])
    return _completion("completion, structured", draw, sizes, structured_outputs=given)


def completion_abort(draw: random.Random, sizes: Sizes) -> Request:
    fields = {"stream": draw.random() < 0.7, "max_tokens": sizes.long_tokens, "ignore_eos": True}
    made = _completion("completion, aborted", draw, sizes, **fields)
    return Request(made.kind, made.path, made.body, "leaves")


def response(draw: random.Random, sizes: Sizes) -> Request:
    # An output of fewer tokens than some is refused by the API itself.
    body = {"input": _prompt(draw, sizes), "max_output_tokens": 16, "stream": draw.random() < 0.5}
    extra = draw.choice([{}, {"store": False}, {"instructions": "Be brief."}, {"metadata": {"a": "b"}}])
    return Request("response", RESPONSES, json.dumps({**body, **extra}).encode())


def response_tools(draw: random.Random, sizes: Sizes) -> Request:
    tools = [{"type": "function", **tool} for tool in TOOLS]
    body = {"input": _prompt(draw, sizes), "tools": tools, "max_output_tokens": 16, "stream": draw.random() < 0.5}
    return Request("response, tools", RESPONSES, json.dumps(body).encode())


def message(draw: random.Random, sizes: Sizes) -> Request:
    body: dict[str, Any] = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": _prompt(draw, sizes)}],
        "max_tokens": _tokens(draw, sizes),
        "stream": draw.random() < 0.5,
    }
    if draw.random() < 0.3:
        body["tools"] = [{"name": t["name"], "input_schema": t["parameters"]} for t in TOOLS]
    if draw.random() < 0.2:
        body["stop_sequences"] = ["STOP"]
    return Request("message", MESSAGES, json.dumps(body).encode())


def tokenize(draw: random.Random, sizes: Sizes) -> Request:
    return Request("tokenize", "/tokenize", json.dumps({"prompt": _prompt(draw, sizes)}).encode())


def look(draw: random.Random, sizes: Sizes) -> Request:
    path = draw.choice(["/health", "/metrics", "/v1/models", "/version"])
    return Request("look", path, b"", method="GET", headers={})


# Weights: most of what users send, and enough of the rest.
ORDINARY: dict[Make, int] = {
    chat: 10,
    chat_stream: 12,
    chat_logprobs: 5,
    chat_tools: 6,
    chat_schema: 5,
    chat_abort: 5,
    completion: 9,
    completion_stream: 9,
    completion_many: 4,
    completion_stop: 6,
    completion_logprobs: 4,
    completion_structured: 4,
    completion_abort: 4,
    response: 6,
    response_tools: 3,
    message: 6,
    tokenize: 1,
    look: 1,
}


def _hostile(kind: str, path: str, body: bytes | dict[str, Any], **more: Any) -> Request:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Request(kind, path, content, hostile=True, **more)


def _base(path: str) -> dict[str, Any]:
    """The least that the endpoint takes."""
    messages = [{"role": "user", "content": "Hello"}]
    return {
        CHAT: {"messages": messages, "max_tokens": 2},
        COMPLETIONS: {"prompt": "Hello", "max_tokens": 2},
        RESPONSES: {"input": "Hello", "max_output_tokens": 16},
        MESSAGES: {"model": "smollm2", "messages": messages, "max_tokens": 2},
    }[path]


def _endpoint(draw: random.Random) -> str:
    return draw.choice([CHAT, COMPLETIONS, RESPONSES, MESSAGES])


def bad_fields(draw: random.Random, sizes: Sizes) -> Request:
    path = _endpoint(draw)
    name = draw.choice(["temperature", "top_p", "max_tokens", "n", "stop", "messages", "prompt", "input", "stream"])
    value = draw.choice(["hot", -1, [], {}, None, [[]], {"a": 1}, True, "x" * 1000])
    return _hostile("bad fields", path, {**_base(path), name: value})


NUMBERS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "seed", "max_tokens", "n"),
    *("logprobs", "top_logprobs", "priority", "truncate_prompt_tokens", "logit_bias", "stop_token_ids"),
)


def extreme_numbers(draw: random.Random, sizes: Sizes) -> Request:
    path = _endpoint(draw)
    name = draw.choice(NUMBERS)
    number = draw.choice([1e39, -1e39, 1e308, 5e-324, 1e-38, 3.5e38, 2**31, 2**63, -(2**63), 2**70, 10**400, -0.0])
    value: Any = {"100": number} if name == "logit_bias" else [number] if name == "stop_token_ids" else number
    return _hostile("extreme numbers", path, {**_base(path), name: value})


def surrogates(draw: random.Random, sizes: Sizes) -> Request:
    path, lone = _endpoint(draw), draw.choice(["\ud800", "a\udfffb", "\udc00\ud800"])
    base = _base(path)
    tool: dict[str, Any] = {"type": "function", "function": {"name": "f", "description": lone, "parameters": {}}}
    fields: list[dict[str, Any]] = [
        {"user": lone},
        {"metadata": {lone: lone}},
        {"stop": [lone]},
        {"model": lone},
        {"tools": [tool]},
        {"prompt": lone, "input": lone, "messages": [{"role": "user", "content": lone}]},
        {"messages": [{"role": lone, "content": "x"}]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"description": lone}}}},
        {"structured_outputs": {"regex": lone}},
        {"cache_salt": lone, "request_id": lone, "safety_identifier": lone, "prompt_cache_key": lone},
    ]
    return _hostile("surrogates", path, {**base, **draw.choice(fields)})


def broken_json(draw: random.Random, sizes: Sizes) -> Request:
    path = _endpoint(draw)
    whole = json.dumps(_base(path)).encode()
    depth = draw.choice([500, 5_000, 50_000])
    bodies = [
        whole[: draw.randrange(len(whole))],
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe" + whole,
        bytes(draw.randrange(256) for _ in range(200)),
        whole.replace(b"2", b"NaN"),
        whole.replace(b"2", b"9" * 5000),
        b'{"messages": ' + b"[" * depth + b"]" * depth + b"}",
        b'{"a":' * depth + b"1" + b"}" * depth,
        whole + whole,
    ]
    return _hostile("broken JSON", path, draw.choice(bodies))


def oversize(draw: random.Random, sizes: Sizes) -> Request:
    path = draw.choice([CHAT, COMPLETIONS, MESSAGES])
    words = 200_000 if draw.random() < 0.01 else 2 * sizes.context
    text = "word " * words
    given = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    return _hostile("oversize prompts", path, {**_base(path), **given})


def announced(draw: random.Random, sizes: Sizes) -> Request:
    """A body that is said to be larger than any may be."""
    length = draw.choice([10**8, 10**12, 10**30])
    head = f"POST {_endpoint(draw)} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return _hostile("oversize bodies", "", b"", raw=f"{head}Content-Length: {length}\r\n\r\n{{".encode())


def half_sent(draw: random.Random, sizes: Sizes) -> Request:
    path = _endpoint(draw)
    return _hostile("half-sent bodies", path, _base(path), manner="half-sends")


def slow_reader(draw: random.Random, sizes: Sizes) -> Request:
    body = {**_base(COMPLETIONS), "max_tokens": sizes.long_tokens, "ignore_eos": True, "stream": True}
    return _hostile("slow readers", COMPLETIONS, body, manner="dawdles")


def unknown_path(draw: random.Random, sizes: Sizes) -> Request:
    path = draw.choice(["/", "/v1", "/v1/chat", "/admin", "/v1/completions/x", "/%2e%2e/etc/passwd", "/v1/files"])
    method = draw.choice(["GET", "POST", "DELETE", "PUT", "OPTIONS"])
    return _hostile("unknown paths", path, b"{}", method=method)


def not_http(draw: random.Random, sizes: Sizes) -> Request:
    choices = [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET\r\n\r\n",
        b"hello\r\n\r\n",
        bytes(draw.randrange(256) for _ in range(64)) + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    ]
    return _hostile("not HTTP", "", b"", raw=draw.choice(choices))


def wrong_type(draw: random.Random, sizes: Sizes) -> Request:
    path = _endpoint(draw)
    kind = draw.choice(["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""])
    return _hostile("wrong content type", path, _base(path), headers={"content-type": kind} if kind else {})


HOSTILE: dict[Make, int] = {
    bad_fields: 5,
    extreme_numbers: 4,
    surrogates: 4,
    broken_json: 4,
    oversize: 2,
    announced: 1,
    half_sent: 2,
    slow_reader: 1,
    unknown_path: 3,
    not_http: 2,
    wrong_type: 2,
}


class Mix:
    """An endless, reproducible sequence of requests, of which a share is hostile."""

    def __init__(self, sizes: Sizes, seed: int, hostile: float = 0.1) -> None:
        self._sizes = sizes
        self._draw = random.Random(seed)
        self._hostile = hostile

    def next(self) -> Request:
        kinds = HOSTILE if self._draw.random() < self._hostile else ORDINARY
        (make,) = self._draw.choices(list(kinds), weights=list(kinds.values()))
        return make(self._draw, self._sizes)
