"""Tools on /v1/chat/completions: scripted answers of several formats behind the real server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.helpers import events_of, http
from tests.server.scripted import ScriptedClient, scripted_app

URL = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}


def tool(name: str = "weather", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": PARAMETERS, **fields}}


TOOLS = [tool(description="Tells the weather"), tool("time")]
BERN = {"city": 'Bern ☀ "quoted"', "days": 2}
OSLO = {"city": "Oslo"}


def hermes(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


# What a model of each family writes for: thinking, a text, a call of `weather` and one of `time`.
CALLS = {
    "hermes": (
        "Let me see.\n"
        f"<tool_call>\n{json.dumps({'name': 'weather', 'arguments': BERN})}\n</tool_call>\n"
        f"<tool_call>\n{json.dumps({'name': 'time', 'arguments': OSLO})}\n</tool_call>"
    ),
    "llama3_json": (
        "<|python_tag|>"
        f"{json.dumps({'name': 'weather', 'parameters': BERN})}; {json.dumps({'name': 'time', 'parameters': OSLO})}"
    ),
    "mistral": (f"Let me see.[TOOL_CALLS]weather[ARGS]{json.dumps(BERN)}[TOOL_CALLS]time[ARGS]{json.dumps(OSLO)}"),
    "mistral_old": (
        "Let me see.[TOOL_CALLS]"
        + json.dumps([{"name": "weather", "arguments": BERN}, {"name": "time", "arguments": OSLO}])
    ),
    "harmony": (
        "<|channel|>analysis<|message|>Which city?<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
        f"<|start|>assistant to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{json.dumps(BERN)}"
        f"<|call|>"
    ),
}
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "none"}
THINKS = {"hermes": "qwen3", "harmony": "harmony", "mistral": "magistral"}


async def post(
    scripts: Any, status: int = 200, chunk: int = 1, server: dict[str, Any] | None = None, **body: Any
) -> Any:
    """The answer's JSON, or the events of a stream, and the client that the engine was asked through."""
    app, provider = scripted_app(**(server or PARSERS))
    client = ScriptedClient(scripts, chunk=chunk)
    provider.use(client)
    async with http(app) as session:
        response = await session.post(URL, json={"messages": HELLO, **body})
    assert response.status_code == status, response.text
    answer = events_of(response.text) if body.get("stream") and status == 200 else response.json()
    return answer, client


def merged(events: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The message that a client puts together from a stream, with its finish reason and log-probabilities."""
    message: dict[str, Any] = {"role": None, "content": None, "refusal": None}
    calls: list[dict[str, Any]] = []
    logprobs: list[Any] = []
    reason = None
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            assert reason is None, "nothing follows the finish reason"
            reason = choice["finish_reason"]
            logprobs += (choice["logprobs"] or {"content": []})["content"]
            for key, value in choice["delta"].items():
                if key == "tool_calls":
                    for delta in value:
                        _add_call(calls, delta)
                elif message.get(key) is None:
                    message[key] = value
                else:
                    message[key] += value
    if calls:
        message["tool_calls"] = calls
    return {"message": message, "finish_reason": reason, "logprobs": logprobs}


def _add_call(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    if delta["index"] == len(calls):
        assert delta["id"]
        assert delta["type"] == "function"
        calls.append({"id": delta["id"], "function": dict(delta["function"]), "type": "function"})
        return
    assert delta["index"] == len(calls) - 1, "calls come one after another"
    assert delta.keys() == {"index", "function"}
    calls[-1]["function"]["arguments"] += delta["function"]["arguments"]


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "id": ""} for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": calls} if calls else message


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("chunk", [1, 7, 1000])
async def test_calls_of_each_format_streamed_and_whole(name: str, chunk: int) -> None:
    server = {"tool_call_parser": name, "reasoning_parser": THINKS.get(name, "none")}
    body, _ = await post(CALLS[name], chunk=chunk, server=server, tools=TOOLS)
    choice = body["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == (None if name == "llama3_json" else "Let me see.")
    expected = [("weather", BERN)] + ([("time", OSLO)] if name != "harmony" else [])
    found = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message["tool_calls"]]
    assert found == expected
    ids = [c["id"] for c in message["tool_calls"]]
    assert len(set(ids)) == len(ids)
    assert all(len(i) == 9 if name.startswith("mistral") else i.startswith("call_") for i in ids)
    if name == "harmony":
        assert message["reasoning"] == message["reasoning_content"] == "Which city?"
    events, _ = await post(CALLS[name], chunk=chunk, server=server, tools=TOOLS, stream=True)
    streamed = merged(events)
    assert without_ids(streamed["message"]) == without_ids(message)
    assert streamed["finish_reason"] == "tool_calls"


TEXTS = st.text(st.sampled_from('ab<>/{}[]"\\,: \n_tool_call'), max_size=12)
PIECES = st.one_of(
    TEXTS,
    st.sampled_from(
        ["<tool_call>\n", "\n</tool_call>", '{"name": "weather", "arguments": ', "<think>", "</think>", "}"]
    ),
    st.builds(
        lambda city: f"<tool_call>\n{json.dumps({'name': 'weather', 'arguments': {'city': city}})}\n</tool_call>",
        TEXTS,
    ),
)


@settings(max_examples=40)
@given(
    pieces=st.lists(PIECES, max_size=6),
    chunk=st.integers(1, 9),
    n=st.integers(1, 2),
    max_tokens=st.one_of(st.none(), st.integers(1, 60)),
    parallel=st.booleans(),
)
async def test_a_stream_says_what_a_body_says_whatever_the_model_says(
    pieces: list[str], chunk: int, n: int, max_tokens: int | None, parallel: bool
) -> None:
    script = "".join(pieces)
    server = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    fields: dict[str, Any] = {
        "tools": TOOLS,
        "n": n,
        "max_tokens": max_tokens,
        "parallel_tool_calls": parallel,
        "logprobs": True,
    }
    body, _ = await post(script, chunk=1000, server=server, **fields)
    events, _ = await post(script, chunk=chunk, server=server, stream=True, **fields)
    for choice in body["choices"]:
        streamed = merged(events, choice["index"])
        assert without_ids(streamed["message"]) == without_ids(choice["message"])
        assert streamed["finish_reason"] == choice["finish_reason"]
        assert streamed["logprobs"] == choice["logprobs"]["content"]
        assert parallel or len(choice["message"].get("tool_calls", ())) <= 1


@pytest.mark.parametrize("chunk", [1, 7, 1000])
async def test_calls_without_their_tags(chunk: int) -> None:
    """As Qwen2.5-Coder writes them. Where the answer has a format of its own, it is the answer."""
    script = json.dumps({"name": "weather", "arguments": BERN}, indent=2) + "\n"
    body, _ = await post(script, chunk=chunk, tools=TOOLS)
    (choice,) = body["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", BERN)
    events, _ = await post(script, chunk=chunk, tools=TOOLS, stream=True)
    assert without_ids(merged(events)["message"]) == without_ids(choice["message"])
    body, _ = await post(script, chunk=chunk, tools=TOOLS, response_format={"type": "json_object"})
    assert body["choices"][0]["message"]["content"] == script
    body, _ = await post("So: " + script, chunk=chunk, tools=TOOLS)
    assert body["choices"][0]["message"]["content"] == "So: " + script


async def test_the_shape_of_streamed_calls() -> None:
    script = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    events, _ = await post(script, chunk=5, tools=TOOLS, stream=True)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant"}
    start = deltas[1]["tool_calls"]
    call_id = start[0].pop("id")
    assert start == [{"index": 0, "type": "function", "function": {"name": "weather", "arguments": ""}}]
    assert call_id.startswith("call_")
    fragments = [delta["tool_calls"] for delta in deltas[2:-1]]
    assert len(fragments) > 2
    assert all(list(f[0]) == ["index", "function"] and list(f[0]["function"]) == ["arguments"] for f in fragments)
    assert deltas[-1] == {}
    assert "".join(f[0]["function"]["arguments"] for f in fragments) == '{"city": "Bern"}'


async def test_what_is_streamed_of_a_call_that_is_cut_short_is_the_beginning_of_json() -> None:
    call = json.dumps({"name": "weather", "arguments": BERN})
    script = f"<tool_call>\n{call}\n</tool_call>"
    arguments = json.dumps(BERN)
    head = script.index(arguments)
    for length in range(head + 1, head + len(arguments.encode())):
        events, _ = await post(script, chunk=3, tools=TOOLS, max_tokens=length, stream=True)
        streamed = merged(events)
        assert streamed["finish_reason"] == "length"
        (made,) = streamed["message"]["tool_calls"]
        assert json.loads(arguments) == BERN
        assert arguments.startswith(made["function"]["arguments"])


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("n", [1, 2])
async def test_an_answer_ends_with_its_first_call_where_there_may_be_no_other(name: str, chunk: int, n: int) -> None:
    server = {"tool_call_parser": name, "reasoning_parser": THINKS.get(name, "none")}
    script = CALLS[name] + " and so on" * 50
    fields: dict[str, Any] = {
        "tools": TOOLS,
        "parallel_tool_calls": False,
        "n": n,
        "max_tokens": 900,
        "logprobs": True,
    }
    fields |= {"stream_options": {"include_usage": True}, "stream": True}
    events, client = await post(script, chunk=chunk, server=server, **fields)
    stopped = 0 if chunk == 1000 else n  # or has said everything already
    assert len(client.aborted) == stopped
    usage = events.pop()["usage"]
    assert usage["completion_tokens"] < n * len(CALLS[name].encode())
    body, client = await post(
        script, chunk=chunk, server=server, **{**fields, "stream": False, "stream_options": None}
    )
    assert len(client.aborted) == stopped
    assert body["usage"] == usage
    for choice in body["choices"]:
        (call,) = choice["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", BERN)
        assert choice["message"]["content"] == (None if name == "llama3_json" else "Let me see.")
        assert choice["finish_reason"] == "tool_calls"
        streamed = merged(events, choice["index"])
        assert without_ids(streamed["message"]) == without_ids(choice["message"])
        assert streamed["finish_reason"] == "tool_calls"
        assert streamed["logprobs"] == choice["logprobs"]["content"]
        assert len(streamed["logprobs"]) == usage["completion_tokens"] // n


async def test_a_call_that_fails_does_not_end_the_answer() -> None:
    script = '<tool_call>\n{"name": "weather", "arguments": {"city": ?}}\n</tool_call> Hm.'
    body, client = await post(script, tools=TOOLS, parallel_tool_calls=False)
    choice = body["choices"][0]
    assert choice["message"]["content"].endswith("Hm.")
    assert choice["finish_reason"] == "stop"
    assert client.aborted == []


async def test_without_tools_or_with_none_nothing_is_a_call() -> None:
    for fields in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
        body, client = await post(CALLS["hermes"], **fields)
        message = body["choices"][0]["message"]
        assert message["content"] == CALLS["hermes"]
        assert "tool_calls" not in message
        assert body["choices"][0]["finish_reason"] == "stop"
        assert "TOOLS" not in client.prompts[0]


async def test_a_parser_that_is_turned_off_leaves_calls_in_the_text() -> None:
    off = {"tool_call_parser": "none", "reasoning_parser": "none"}
    body, client = await post(CALLS["hermes"], server=off, tools=TOOLS)
    assert body["choices"][0]["message"]["content"] == CALLS["hermes"]
    assert "TOOLS" in client.prompts[0]
    body, _ = await post("", 400, server=off, tools=TOOLS, tool_choice="required")
    assert body["error"]["param"] == "tool_choice"


async def test_malformed_calls_stay_text_with_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    script = 'Well <tool_call>\n{"name": 3}\n</tool_call> and <tool_call>{]</tool_call>'
    body, _ = await post(script, tools=TOOLS)
    assert body["choices"][0]["message"]["content"] == script
    assert body["choices"][0]["finish_reason"] == "stop"
    lines = [record for record in caplog.records if "malformed" in record.getMessage()]
    assert len(lines) == 1
    assert "name" not in lines[0].getMessage(), "what a model says is not for the log"


async def test_thinking_is_kept_apart_from_the_answer() -> None:
    server = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    script = "<think>\nHm, 2 + 2.\n</think>\n\nIt is 4."
    body, _ = await post(script, server=server)
    message = body["choices"][0]["message"]
    assert (message["content"], message["reasoning"], message["reasoning_content"]) == (
        "It is 4.",
        "Hm, 2 + 2.",
        "Hm, 2 + 2.",
    )
    hidden, _ = await post(script, server=server, include_reasoning=False)
    assert "reasoning" not in hidden["choices"][0]["message"]
    assert hidden["usage"] == body["usage"]
    events, _ = await post(script, server=server, include_reasoning=False, stream=True)
    assert merged(events)["message"] == hidden["choices"][0]["message"]
    # The prompt has begun the thinking already, and the answer is cut short in it.
    fields = {"chat_template_kwargs": {"opening": "<think>\n"}, "max_tokens": 6}
    body, _ = await post("Hm, 2 + 2.", server=server, **fields)
    assert body["choices"][0]["message"]["reasoning"] == "Hm, 2 "
    assert body["choices"][0]["message"]["content"] == ""
    # The prompt has ended it.
    fields = {"chat_template_kwargs": {"opening": "<think>\n\n</think>\n\n"}}
    body, _ = await post("It is 4.", server=server, **fields)
    assert body["choices"][0]["message"]["content"] == "It is 4."


@pytest.mark.parametrize("chunk", [1, 5, 1000])
@pytest.mark.parametrize(
    ("reasoning", "opening", "script", "count"),
    [
        ("magistral", "", "[THINK]Hm.[/THINK]So.", 3),
        ("magistral", "[THINK]", "Hm.[/THINK]So.", 3),
        ("magistral", "[THINK]", "Hm, well", 8),
        ("magistral", "", "So.", 0),
        ("harmony", "", CALLS["harmony"], len("Which city?")),
        # Of marks that are several tokens, the last completes them.
        ("qwen3", "", "<think>Hm.</think>So.", len("Hm.</think")),
        ("none", "", "<think>Hm.</think>So.", 0),
    ],
)
async def test_tokens_of_thinking_are_counted(
    reasoning: str, opening: str, script: str, count: int, chunk: int
) -> None:
    tool_format = reasoning if reasoning == "harmony" else "hermes"
    server = {"tool_call_parser": tool_format, "reasoning_parser": reasoning}
    fields: dict[str, Any] = {"chat_template_kwargs": {"opening": opening}, "tools": TOOLS, "max_tokens": 900, "n": 2}
    body, _ = await post(script, chunk=chunk, server=server, **fields)
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 * count}
    options = {"include_usage": True, "continuous_usage_stats": True}
    events, _ = await post(script, chunk=chunk, server=server, stream=True, stream_options=options, **fields)
    assert events[-1]["usage"] == body["usage"]
    counts = [event["usage"]["completion_tokens_details"]["reasoning_tokens"] for event in events]
    assert counts == sorted(counts)


async def test_special_tokens_are_seen_by_the_parser_and_not_by_the_client() -> None:
    server = {"tool_call_parser": "mistral", "reasoning_parser": "none"}
    script = f"One<unused> two.[TOOL_CALLS]weather[ARGS]{json.dumps(OSLO)}"
    body, _ = await post(script, server=server, tools=TOOLS)
    assert body["choices"][0]["message"]["content"] == "One two."
    shown, _ = await post(script, server=server, tools=TOOLS, skip_special_tokens=False)
    assert shown["choices"][0]["message"]["content"] == "One<unused> two."
    assert shown["choices"][0]["message"]["tool_calls"]
    plain, _ = await post("One<unused> two.", server=server)
    assert plain["choices"][0]["message"]["content"] == "One two."


async def test_tools_and_the_history_of_calls_reach_the_template() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sun"}]},
    ]
    _, client = await post("x", tools=[tool(description="Tells", strict=False)], messages=messages)
    (prompt,) = client.prompts
    listed, rest = prompt.split("\n", 1)
    function = {"name": "weather", "description": "Tells", "parameters": PARAMETERS}
    assert json.loads(listed.removeprefix("TOOLS ")) == [{"type": "function", "function": function}]
    assert rest == (
        '[user]Hello\n[assistant] THOUGHT Hm CALL weather {"city": "Bern"}\n[tool]sun FOR call_1\n[assistant]'
    )


async def test_allowed_tools_are_those_that_the_model_hears_of() -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "time"}}]}
    _, client = await post("x", tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert '"time"' in client.prompts[0]
    assert "weather" not in client.prompts[0]


@pytest.mark.parametrize(
    ("effort", "expected"),
    [("high", "high True True"), ("none", " False False"), (None, "  ")],
)
async def test_reasoning_effort_reaches_the_template(effort: str | None, expected: str) -> None:
    server = {"allow_request_chat_template": True}
    template = "{{ reasoning_effort }} {{ enable_thinking }} {{ thinking }}"
    _, client = await post("x", server=server, chat_template=template + "!", reasoning_effort=effort)
    assert client.prompts[0] == expected + "!"
    _, client = await post(
        "x",
        server=server,
        chat_template=template,
        reasoning_effort="low",
        chat_template_kwargs={"enable_thinking": False},
    )
    assert client.prompts[0] == "low False True"


async def test_echo_goes_before_the_text_next_to_a_call() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Well. "}]
    fields: dict[str, Any] = {"messages": messages, "continue_final_message": True, "echo": True, "tools": TOOLS}
    body, _ = await post(CALLS["hermes"], **fields)
    assert body["choices"][0]["message"]["content"] == "Well. Let me see."
    events, _ = await post(CALLS["hermes"], stream=True, **fields)
    assert without_ids(merged(events)["message"]) == without_ids(body["choices"][0]["message"])


# Whether long lists of texts have equal entries is more than an automaton can tell.
UNSAYABLE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "a", "schema": PARAMETERS}}


def grammar_of(client: ScriptedClient) -> Any:
    return client.added[0].grammar


@pytest.mark.parametrize(
    ("fields", "kind", "mentions"),
    [
        ({"tools": TOOLS}, None, ()),
        ({"tools": TOOLS, "tool_choice": "required"}, "grammar", ("weather", "time", "tool_call")),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "time"}}},
            "grammar",
            ("time", "tool_call"),
        ),
        ({"tools": [tool(strict=True)]}, "grammar", ("weather", "days")),
        ({"tools": TOOLS, "response_format": FORMAT}, "grammar", ("answer", "weather")),
        ({"tools": TOOLS, "tool_choice": "none", "response_format": FORMAT}, "json", ("city",)),
        ({"response_format": FORMAT}, "json", ("city",)),
        ({"response_format": {"type": "json_object"}}, "json", ("object",)),
        ({"response_format": {"type": "text"}}, None, ()),
        ({"structured_outputs": {"regex": "a+"}}, "regex", ("a+",)),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ("a", "b")),
        ({"structured_outputs": {"json": PARAMETERS}}, "json", ("city",)),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", ("start",)),
        ({"structured_outputs": {}}, None, ()),
    ],
)
async def test_what_the_engine_is_told_to_hold_to(fields: dict[str, Any], kind: str | None, mentions: Any) -> None:
    _, client = await post("x", **fields)
    grammar = grammar_of(client)
    assert (None if grammar is None else grammar.kind) == kind
    assert all(word in grammar.text for word in mentions)
    if "weather" not in mentions and grammar is not None:
        assert "weather" not in grammar.text


@pytest.mark.parametrize(
    "wanted",
    [
        {"response_format": FORMAT},
        {"structured_outputs": {"regex": "start[a-z]/+"}},
        {"structured_outputs": {"choice": ["start", "b"]}},
        {"structured_outputs": {"grammar": 'start: "start" | rest // start\nrest: /start/ start?'}},
    ],
)
@pytest.mark.parametrize("reasoning", ["qwen3", "harmony"])
async def test_thinking_is_free_before_a_constrained_answer(wanted: dict[str, Any], reasoning: str) -> None:
    server = {"tool_call_parser": "harmony" if reasoning == "harmony" else "hermes", "reasoning_parser": reasoning}
    _, client = await post("x", server=server, **wanted)
    grammar = grammar_of(client)
    assert grammar.kind == "grammar"
    assert "answer" in grammar.text
    closed = {"chat_template_kwargs": {"opening": "<think>\n\n</think>\n\n"}}
    _, client = await post("x", server=server, **wanted, **closed)
    assert (grammar_of(client).kind != "grammar") == (reasoning == "qwen3" and "grammar" not in str(wanted))


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [tool("not a name")]}, "tools[0].function", "not a name"),
        ({"tools": [tool("x" * 129)]}, "tools[0].function", "128"),
        ({"tools": [tool(), tool()]}, "tools[1].function", "tools[0]"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", "custom"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "missing"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function", "object"),
        ({"tools": "all"}, "tools", "all"),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "tools"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", "always"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.type", "tool"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function.name", "missing"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "weather, time",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}},
            "tool_choice.allowed_tools",
            "list",
        ),
        (
            {"tools": [tool(), tool("b", strict=True, parameters={"properties": {"a": {"type": "strin"}}})]},
            "tools[1].function.parameters",
            "type at #/properties/a/type",
        ),
        (
            {"tools": [tool(parameters=UNSAYABLE, strict=True)], "tool_choice": "required"},
            "tools[0].function.parameters",
            "uniqueItems at #/properties/a/uniqueItems is not supported here",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": UNSAYABLE, "strict": True}}},
            "response_format.json_schema.schema",
            "uniqueItems at #/properties/a/uniqueItems is not supported here",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "missing"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"response_format": "json"}, "response_format", "json"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "("),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex, choice"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "empty"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "jsn"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "response_format",
        ),
        ({"guided_json": {}}, "guided_json", "structured_outputs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_wrong_is_named(fields: dict[str, Any], param: str, says: str, stream: bool) -> None:
    answer, client = await post("x", 400, stream=stream, **fields)
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == param
    assert says in answer["error"]["message"]
    assert client.added == []


async def test_a_tool_schema_that_nobody_holds_to_is_not_judged() -> None:
    body, _ = await post("x", tools=[tool(parameters=UNSAYABLE)])
    assert body["choices"][0]["message"]["content"] == "x"
