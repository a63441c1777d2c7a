"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import openai
import pytest

from quire.types.outputs import EngineOutput
from quire.types.sampling import PoolingParams
from tests.frontend.fake_client import MAX_MODEL_LEN, FakeClient, PoolingClient, Running
from tests.server.helpers import MODEL, http, make_app, serving

URL = "/v1/embeddings"


async def post(body: dict[str, Any], client: FakeClient | None = None, url: str = URL) -> Any:
    async with serving(client or PoolingClient()) as session:
        return await session.post(url, json=body)


async def test_one_text() -> None:
    answer = (await post({"input": "Hi", "model": MODEL})).json()
    assert answer.pop("id").startswith("embd-")
    assert answer.pop("created") > 0
    assert answer == {
        "object": "list",
        "model": MODEL,
        "data": [{"object": "embedding", "index": 0, "embedding": [2.0, 72.0, 105.0]}],
        "usage": {"prompt_tokens": 2, "total_tokens": 2},
    }


@pytest.mark.parametrize(("given", "lengths"), [(["a", "bcd"], [1, 3]), ([1, 2, 3], [3]), ([[1], [2, 3]], [1, 2])])
async def test_texts_and_token_ids(given: Any, lengths: list[int]) -> None:
    answer = (await post({"input": given})).json()
    assert [item["index"] for item in answer["data"]] == list(range(len(lengths)))
    assert [item["embedding"][0] for item in answer["data"]] == lengths
    assert answer["usage"]["prompt_tokens"] == sum(lengths)


async def test_base64_is_the_same_vector() -> None:
    plain, packed = [
        (await post({"input": "Hello", "encoding_format": kind})).json()["data"][0]["embedding"]
        for kind in ("float", "base64")
    ]
    assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == plain


@pytest.mark.parametrize("count", [3000, pytest.param(100_000, marks=pytest.mark.nightly)])
async def test_a_batch_may_be_longer_than_the_engine_and_the_queue_take(count: int) -> None:
    client = PoolingClient()
    texts = [f"{number}" for number in range(count)]
    async with serving(client, max_queue=4) as session:
        answer = (await session.post(URL, json={"input": texts})).json()
    assert [item["embedding"][0] for item in answer["data"]] == [len(text) for text in texts]
    assert len(client.added) == len(texts)


async def test_the_openai_client() -> None:
    async with openai.AsyncOpenAI(
        api_key="none", base_url="http://quire/v1", http_client=http(make_app(PoolingClient()))
    ) as client:
        answer = await client.embeddings.create(model=MODEL, input=["Hi", "you"], dimensions=2)
    assert [item.embedding for item in answer.data] == [[2.0, 72.0], [3.0, 121.0]]
    assert answer.usage.total_tokens == 5


async def test_the_models_own_prompts_go_before_texts() -> None:
    prompts = {"prompts": {"query": "q: ", "passage": ""}, "default_prompt": "passage"}
    for name, length in ((None, 2), ("query", 5)):
        answer = (await post({"input": "Hi", "prompt_name": name}, PoolingClient(**prompts))).json()
        assert answer["data"][0]["embedding"][0] == length
    client = PoolingClient(**{**prompts, "default_prompt": "query"})
    await post({"input": ["Hi", "you"], "instruction": "Find: "}, client)
    assert [bytes(request.token_ids) for request in client.added] == [b"Find: Hi", b"Find: you"]
    both = await post({"input": "Hi", "prompt_name": "query", "instruction": "Find: "}, PoolingClient(**prompts))
    assert (both.status_code, both.json()["error"]["param"]) == (400, "instruction")
    refused = await post({"input": "Hi", "prompt_name": "other"}, PoolingClient(**prompts))
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == (
        "prompt_name is 'other', which this model does not have; it has query, passage"
    )


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": []}, "input", "empty list"),
        ({"input": ""}, "input", "empty"),
        ({"input": ["a", ""]}, "input", "empty"),
        ({"input": [[]]}, "input", "empty"),
        ({"input": [99_999]}, "input", "go from 0 to"),
        ({"input": "x" * (MAX_MODEL_LEN + 1)}, "input", f"maximum context length is {MAX_MODEL_LEN} tokens, but"),
        ({"input": "a", "dimensions": 4}, "dimensions", "vectors of this model have 3"),
        ({"input": "a", "dimensions": 0}, "dimensions", "a positive integer"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "temperature": 1}, "temperature", "is not a field of /v1/embeddings"),
    ],
)
async def test_what_is_wrong_is_named(body: dict[str, Any], param: str, words: str) -> None:
    refused = await post(body)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param
    assert words in refused.json()["error"]["message"]


async def test_a_text_may_be_as_long_as_the_context_or_truncated_to_it() -> None:
    for text, keep in (("x" * MAX_MODEL_LEN, None), ("x" * 9999, -1)):
        answer = (await post({"input": text, "truncate_prompt_tokens": keep})).json()
        assert answer["usage"]["prompt_tokens"] == MAX_MODEL_LEN


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}),
    ],
)
async def test_text_of_a_model_that_embeds_is_refused_with_what_to_do(url: str, body: dict[str, Any]) -> None:
    refused = await post(body, url=url)
    assert refused.status_code == 400
    assert "makes embeddings and no text; use POST /v1/embeddings" in refused.json()["error"]["message"]


async def test_embeddings_of_a_model_that_generates_are_refused_with_what_to_do() -> None:
    refused = await post({"input": "Hi"}, FakeClient("x"))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "model"
    assert "generates text and no embeddings; use POST /v1/chat/completions" in refused.json()["error"]["message"]


class BothClient(PoolingClient):
    """Generates and embeds."""

    def __init__(self) -> None:
        super().__init__(tasks=("embed",), generates=True)

    def _step(self, running: Running) -> EngineOutput:
        if isinstance(running.request.params, PoolingParams):
            return super()._step(running)
        return FakeClient._step(self, running)


async def test_a_server_that_generates_embeds_when_asked() -> None:
    async with serving(BothClient()) as session:
        embedded = await session.post(URL, json={"input": "Hi"})
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        answered = await session.post("/v1/chat/completions", json=chat)
        refused = await session.post("/classify", json={"input": "Hi"})
        shown = await session.post("/api/show", json={"model": MODEL})
    assert embedded.json()["data"][0]["embedding"] == [2.0, 72.0, 105.0]
    assert answered.json()["choices"][0]["message"]["content"] == "[use"
    assert refused.status_code == 400
    assert "this model generates text and no classes" in refused.json()["error"]["message"]
    assert {"completion", "embedding"} <= set(shown.json()["capabilities"])
