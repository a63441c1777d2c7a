"""Every string of every body with a lone surrogate, and every number with extremes: a 400 that names the field.

The bodies come from the published schemas, so a new field is tried without a line here.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import httpx
import msgspec
import pytest

from quire.server.access import ROUTES
from quire.structured.guidance import GuidanceBackend
from quire.types.sampling import SamplingParams
from quire.types.structured import GrammarError, GrammarSource
from tests.frontend.fake_client import ClassifyingClient, PoolingClient
from tests.runner.sampling.helpers import MAX_ROWS, make_logits, run
from tests.runner.sampling.reference import Row
from tests.server.body_holes import Hole, holes
from tests.server.helpers import http, long_client, make_app
from tests.server.pooling_bodies import POOLING_BODIES
from tests.structured.words import VOCABULARY

EXTREMES = (1e-38, -1e-45, 3.5e38, -1e39, 1e308, 1 << 31, -(1 << 63) - 1, 1 << 64, 10**30, 10**400)
NAN = ("NaN", "Infinity", "1e999")
APP = make_app()
HOLES = list(holes(APP))
OPERATORS = {path for (_, path), access in ROUTES.items() if access.key == "admin"}
ADMIN_KEY = "operator"
PATHS = sorted({hole.path for hole in HOLES})


def test_the_schemas_are_looked_into() -> None:
    found = {(hole.path, hole.field, hole.kind) for hole in HOLES}
    assert PATHS == [
        "/api/chat",
        "/api/embed",
        "/api/embeddings",
        "/api/generate",
        "/api/show",
        "/classify",
        "/detokenize",
        "/invocations",
        "/pooling",
        "/rerank",
        "/score",
        "/tokenize",
        "/v1/chat/completions",
        "/v1/chat/completions/render",
        "/v1/completions",
        "/v1/completions/render",
        "/v1/embeddings",
        "/v1/load_lora_adapter",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/rerank",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/score",
        "/v1/unload_lora_adapter",
        "/v2/rerank",
    ]
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages"):
        assert (path, "repetition_penalty", "number") in found
        assert (path, "logit_bias", "number") in found
    for field in ("user", "metadata", "safety_identifier", "prompt_cache_key", "reasoning", "text", "tools"):
        assert ("/v1/responses", field, "string") in found


@pytest.mark.parametrize("path", PATHS)
async def test_every_string_with_a_lone_surrogate(path: str) -> None:
    client = long_client("x")
    async with http(make_app(client, admin_keys=(ADMIN_KEY,))) as session:
        for hole in holes_of(path, "string"):
            for value in ("\ud800", "a\udc00b"):
                answer = await post(session, path, json.dumps(hole.body(value)))
                assert_names(answer, hole)
    assert client.added == []


@pytest.mark.parametrize("path", PATHS)
async def test_every_number_with_extremes(path: str) -> None:
    client = PoolingClient() if path in POOLING_BODIES or "/embed" in path else long_client("x")
    if path == "/classify":
        client = ClassifyingClient("a")
    async with http(make_app(client, admin_keys=(ADMIN_KEY,))) as session:
        for hole in holes_of(path, "number"):
            for value in EXTREMES:
                answer = await post(session, path, json.dumps(hole.body(value)))
                if answer.status_code != 200 and not names_no_adapter(answer, path):
                    assert_names(answer, hole, value)
            for word in NAN:
                body = json.dumps(hole.body("a hole")).replace('"a hole"', word)
                assert_names(await post(session, path, body), hole, word)
    # Sampling parameters are no keys of a set where one of them is a dict.
    asked = {msgspec.msgpack.encode(request.params): request for request in client.added}
    assert_sampled([request.params for request in asked.values() if isinstance(request.params, SamplingParams)])
    assert_compiled({request.grammar for request in client.added if request.grammar is not None})


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict"])
async def test_a_length_that_no_context_has_is_refused_at_once(field: str) -> None:
    """Clamped, such a number would be minutes of text that nobody asked for; what a context might have is clamped."""
    client = long_client("x")
    numbers = [hole for hole in HOLES if hole.kind == "number"]
    found = [hole for hole in numbers if f'"{field}": 77' in json.dumps(hole.body(77))]
    assert found
    async with http(make_app(client, admin_keys=(ADMIN_KEY,))) as session:
        for hole in found:
            assert_names(await post(session, hole.path, json.dumps(hole.body(10**30))), hole)
            assert client.added == []


def holes_of(path: str, kind: str) -> list[Hole]:
    return [hole for hole in HOLES if hole.path == path and hole.kind == kind]


async def post(session: httpx.AsyncClient, path: str, body: str) -> httpx.Response:
    headers = {"content-type": "application/json"}
    if path in OPERATORS:
        headers["authorization"] = f"Bearer {ADMIN_KEY}"
    return await session.post(path, content=body, headers=headers)


def names_no_adapter(answer: httpx.Response, path: str) -> bool:
    """Whether an operator's body was taken as it is: the least one names an adapter that there is not."""
    return path in OPERATORS and (answer.status_code, answer.json()["error"]["param"]) in (
        (400, "lora_path"),
        (404, "lora_name"),
    )


def assert_names(answer: httpx.Response, hole: Hole, value: Any = None) -> None:
    assert answer.status_code == 400, (hole, value, answer.text)
    error = answer.json()["error"]
    if isinstance(error, str):  # Ollama's form
        error = {"message": error}
    named = error["message"] if "param" not in error else error["param"] or ""
    assert hole.field in named, (hole, value, answer.text)


def assert_compiled(sources: set[GrammarSource]) -> None:
    """What the API accepts as a grammar compiles, or is refused as a grammar."""
    backend = GuidanceBackend(VOCABULARY)
    for source in sources:
        with contextlib.suppress(GrammarError):
            backend.compile(source).matcher()


def assert_sampled(accepted: list[SamplingParams]) -> None:
    """What the API accepts, the sampler can do: no parameter makes it fail, or a logit overflow."""
    rows = [Row(params, [1, 2, 3], [4, 5, 5], 7, (9,)) for params in accepted]
    for begin in range(0, len(rows), MAX_ROWS):
        batch = rows[begin : begin + MAX_ROWS]
        output = run(make_logits(begin, len(batch), 258), batch)
        assert output.errors() == {}, [batch[index].params for index in output.errors()]
