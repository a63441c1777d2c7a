"""Every API over engines that die again and again: clients get what they would have got of one that lives."""

from __future__ import annotations

import asyncio
import functools
import json
import random
from typing import Any

import pytest
from fastapi import FastAPI

from quire.frontend.async_engine import AsyncEngine
from tests.frontend.mortal import Keeper, KillNow, MortalClient
from tests.server.helpers import FakeProvider, http, make_app
from tests.server.openai.chat.test_tools import BERN, TOOLS, hermes, merged
from tests.server.scripted import TEXT, ScriptedClient

HELLO = [{"role": "user", "content": "Hello"}]
THINKING = f"<think>\nHm, 2 + 2 größer 🦉.\n</think>\n\nIt is 4.\n{hermes('weather', BERN)}\n{hermes('time', BERN)}"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
FLAT_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]
CLAUDE_TOOLS = [{"name": "weather", "input_schema": SCHEMA}, {"name": "time", "input_schema": SCHEMA}]

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "chat with tools, thinking, log-probabilities": (
        CHAT,
        THINKING,
        {"messages": HELLO, "tools": TOOLS, "n": 2, "logprobs": True, "top_logprobs": 2, "max_tokens": 400},
    ),
    "chat that stops at a string": (CHAT, "one two three", {"messages": HELLO, "stop": ["three"], "n": 3}),
    "chat with a grammar": (
        CHAT,
        '{"a": 12}',
        {
            "messages": HELLO,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        },
    ),
    "completions of two prompts": (
        COMPLETIONS,
        "and so on and so on",
        {"prompt": ["Well", "So"], "n": 2, "logprobs": 1, "max_tokens": 9},
    ),
    "responses": (
        RESPONSES,
        THINKING,
        {"input": "Hello", "tools": FLAT_TOOLS, "max_output_tokens": 400, "reasoning": {"effort": "medium"}},
    ),
    "messages": (
        MESSAGES,
        THINKING,
        {"messages": HELLO, "tools": CLAUDE_TOOLS, "max_tokens": 400, "thinking": {"type": "adaptive"}},
    ),
}


class MortalScripted(ScriptedClient, MortalClient):
    """Says a script, and may die."""


class MortalProvider(FakeProvider):
    def use(self, keeper: Keeper) -> None:
        self._engine = AsyncEngine(keeper.client, self.text)


@functools.cache
def app() -> tuple[FastAPI, MortalProvider]:
    provider = MortalProvider(ScriptedClient(""), TEXT)
    return make_app(provider=provider, tool_call_parser="hermes", reasoning_parser="qwen3", max_logprobs=5), provider


async def ask(script: str, path: str, body: dict[str, Any], make: Any) -> tuple[Any, Keeper]:
    served, provider = app()
    async with Keeper(make) as keeper, http(served) as session:
        provider.use(keeper)
        async with asyncio.timeout(30):
            response = await session.post(path, json=body)
        provider.engine.shutdown()
    assert response.status_code == 200, response.text
    return folded(path, response.text) if body["stream"] else scrubbed(response.json()), keeper


IDS = {"id", "created", "created_at", "completed_at", "item_id", "call_id", "sequence_number"}


def scrubbed(value: Any) -> Any:
    """Without what differs between two equal answers."""
    if isinstance(value, dict):
        return {name: scrubbed(item) for name, item in value.items() if name not in IDS}
    return [scrubbed(item) for item in value] if isinstance(value, list) else value


def folded(path: str, text: str) -> Any:
    """What a client puts together from a stream."""
    assert '"error"' not in text.replace('"error":null', "").replace('"error": null', "")
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    if path == RESPONSES:
        said = "".join(event["delta"] for event in events if event["type"].endswith(".delta"))
        assert events[-1]["type"] == "response.completed"
        return said, scrubbed(events[-1])
    if path == CHAT:
        return [scrubbed(merged(events, index)) for index in range(3)]
    if path == MESSAGES:
        blocks: dict[int, str] = {}
        for event in events:
            if event["type"] == "content_block_delta":
                delta = {name: value for name, value in event["delta"].items() if name != "type"}
                blocks[event["index"]] = blocks.get(event["index"], "") + "".join(map(str, delta.values()))
        assert events[-1]["type"] == "message_stop"
        return blocks, scrubbed(events[-2])
    choices: dict[int, list[Any]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        fold = choices.setdefault(choice["index"], ["", [], [], None])
        fold[0] += choice["text"]
        fold[1] += (choice["logprobs"] or {"tokens": []})["tokens"]
        fold[2] += choice.get("prompt_logprobs") or []
        fold[3] = choice["finish_reason"]
    return choices


def random_kills(chance: random.Random) -> KillNow:
    """A life in which all running requests get a token; then the end may come."""

    def kills(client: MortalClient) -> bool:
        return client.num_steps >= 2 and chance.random() < 0.2

    return kills


def at_once(client: MortalClient) -> bool:
    return True


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("case", CASES)
async def test_clients_get_the_same_over_many_deaths(case: str, stream: bool) -> None:
    path, script, body = CASES[case]
    body = {**body, "stream": stream}
    if path == COMPLETIONS and not stream:
        body["prompt_logprobs"] = 1
    whole, _ = await ask(script, path, body, lambda: MortalScripted(script, text=TEXT))
    num_losses = 0
    for seed in range(4):
        chance = random.Random(seed)
        lives = iter(range(1000))

        def mortal(chance: random.Random = chance, lives: Any = lives) -> MortalScripted:
            # Every third engine dies before it has said anything.
            kills = at_once if next(lives) % 3 == 1 else random_kills(chance)
            return MortalScripted(script, text=TEXT, kills=kills)

        killed, keeper = await ask(script, path, body, mortal)
        assert killed == whole
        num_losses += len(keeper.losses)
    assert num_losses > 4
