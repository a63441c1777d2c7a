"""POST /pooling, /classify, /score and /rerank."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import numpy as np
import pytest

from tests.frontend.fake_client import MAX_MODEL_LEN, ClassifyingClient, FakeClient, PoolingClient
from tests.server.helpers import MODEL, serving
from tests.server.pooling_bodies import POOLING_BODIES


async def post(url: str, body: dict[str, Any], client: FakeClient) -> httpx.Response:
    async with serving(client) as session:
        return await session.post(url, json=body)


async def test_classify() -> None:
    answer = (await post("/classify", {"input": ["xx", "xa", "ab"]}, ClassifyingClient("no", "yes"))).json()
    assert answer.pop("id").startswith("classify-")
    assert answer.pop("created") > 0
    assert answer == {
        "object": "list",
        "model": MODEL,
        "data": [
            {"index": 0, "label": "yes", "probs": [0.0, 1.0], "num_classes": 2},
            {"index": 1, "label": "no", "probs": [0.5, 0.5], "num_classes": 2},
            {"index": 2, "label": "no", "probs": [1.0, 0.0], "num_classes": 2},
        ],
        "usage": {"prompt_tokens": 6, "total_tokens": 6, "completion_tokens": 0},
    }


@pytest.mark.parametrize(("field", "sent"), [("use_activation", "none"), ("activation", "none"), (None, "softmax")])
async def test_logits_are_told_without_the_activation(field: str | None, sent: str) -> None:
    client = ClassifyingClient("no", "yes")
    await post("/classify", {"input": "x", **({field: False} if field else {})}, client)
    assert [(request.params.head, request.params.activation) for request in client.added] == [("classify", sent)]


@pytest.mark.parametrize("url", ["/score", "/v1/score"])
@pytest.mark.parametrize(("first", "second"), [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")])
async def test_scores_of_a_reranker(url: str, first: str, second: str) -> None:
    answer = (await post(url, {first: "ab", second: ["xx", "cd"]}, ClassifyingClient("fits"))).json()
    assert answer["data"] == [
        {"index": 0, "object": "score", "score": 0.5},
        {"index": 1, "object": "score", "score": 0.0},
    ]
    pairs = (await post(url, {first: ["xx", "ab"], second: ["xx", "cd"]}, ClassifyingClient("fits"))).json()
    assert [item["score"] for item in pairs["data"]] == [1.0, 0.0]


async def test_an_embedder_scores_by_the_cosine_and_reads_each_text_once() -> None:
    client = PoolingClient()
    answer = (await post("/score", {"text_1": "ab", "text_2": ["ab", "b", "ab"]}, client)).json()
    assert len(client.added) == 2
    same, other, again = (item["score"] for item in answer["data"])
    assert same == again == pytest.approx(1.0)
    assert other < 1.0


async def test_a_multi_vector_model_scores_by_max_sim() -> None:
    late = {"kind": "all", "tasks": ("token_embed",), "score": "late"}
    answer = (await post("/score", {"text_1": "ab", "text_2": ["ab", "abc"]}, PoolingClient(**late))).json()
    query, document = [2.0, 97.0, 98.0], [3.0, 97.0, 99.0]
    assert [item["score"] for item in answer["data"]] == [2 * np.dot(query, query), 2 * np.dot(query, document)]


@pytest.mark.parametrize(("url", "texts"), [("/rerank", True), ("/v1/rerank", True), ("/v2/rerank", False)])
async def test_rerank_puts_the_best_first_and_of_equal_ones_the_earlier(url: str, texts: bool) -> None:
    body = {"query": "a", "documents": ["bx", "cc", {"text": "xx"}, "xd", "ee"]}
    answer = (await post(url, body, ClassifyingClient("fits"))).json()
    assert [item["index"] for item in answer["results"]] == [2, 0, 3, 1, 4]
    assert [item["relevance_score"] for item in answer["results"][1:3]] == [pytest.approx(1 / 3)] * 2
    assert [item.get("document") for item in answer["results"][:2]] == (
        [{"text": "xx"}, {"text": "bx"}] if texts else [None, None]
    )
    assert answer["usage"]["total_tokens"] == 15
    assert answer["meta"]["billed_units"] == {"search_units": 1}
    best = (await post(url, {**body, "top_n": 1, "return_documents": not texts}, ClassifyingClient("fits"))).json()
    assert [item["index"] for item in best["results"]] == [2]
    assert ("document" in best["results"][0]) is not texts


async def test_rerank_reads_the_beginnings_of_documents() -> None:
    client = ClassifyingClient("fits")
    await post("/rerank", {"query": "a", "documents": ["bcdefg"], "max_tokens_per_doc": 2}, client)
    assert bytes(client.added[0].token_ids) == b"abc"


async def test_a_pair_is_cut_in_its_document() -> None:
    client = ClassifyingClient("fits")
    body = {"query": "ab", "documents": ["x" * 9999], "truncate_prompt_tokens": -1}
    assert (await post("/rerank", body, client)).status_code == 200
    assert bytes(client.added[0].token_ids) == b"ab" + b"x" * (MAX_MODEL_LEN - 2)


@pytest.mark.parametrize("kind", ["float", "base64"])
async def test_pooling_gives_vectors_of_prompts_and_tokens(kind: str) -> None:
    for task, shape in ((None, (3,)), ("token_embed", (2, 3))):
        body = {"input": "Hi", "task": task, "encoding_format": kind}
        (item,) = (await post("/pooling", body, PoolingClient())).json()["data"]
        data = item["data"]
        values = np.frombuffer(base64.b64decode(data), "<f4") if kind == "base64" else np.array(data)
        assert values.reshape(shape).ravel()[:3].tolist() == [2.0, 72.0, 105.0]
        assert item["object"] == "pooling"


async def test_sparse_weights_are_told_by_token_id() -> None:
    sparse = {"kind": "max", "tasks": ("sparse",), "heads": {"sparse": ()}, "score": None}
    answer = (await post("/pooling", {"input": "Hi"}, PoolingClient(**sparse))).json()
    assert answer["data"][0]["data"] == {"0": 2.0, "1": 72.0, "2": 105.0}
    lexical = {"tasks": ("embed", "token_embed", "sparse"), "heads": {"sparse": ()}}
    answer = (await post("/pooling", {"input": "Hii", "task": "sparse"}, PoolingClient(**lexical))).json()
    assert answer["data"][0]["data"] == {"72": 3.0, "105": 3.0}


@pytest.mark.parametrize(
    ("url", "body", "client", "words"),
    [
        ("/classify", {}, PoolingClient(), "makes embeddings and no classes; use POST /v1/embeddings"),
        ("/classify", {}, FakeClient("x"), "generates text and no classes; use POST /v1/chat/completions or"
            " LLM.generate, or start it with --convert classify"),
        ("/v1/embeddings", {}, ClassifyingClient("a"), "makes classes and no embeddings; use POST /classify or"
            " LLM.classify, or start it with --convert embed"),
        ("/rerank", {}, ClassifyingClient("a", "b"), "makes classes and no scores; use POST /classify"),
        ("/score", {}, FakeClient("x"), "generates text and no scores"),
        ("/pooling", {"task": "sparse"}, PoolingClient(), "makes embeddings and no weights of tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, ClassifyingClient("a"),
            "makes classes and no text; use POST /classify or LLM.classify, or a model that generates"),
    ],
)  # fmt: skip
async def test_what_a_model_cannot_do_is_refused_with_what_it_can(
    url: str, body: dict[str, Any], client: FakeClient, words: str
) -> None:
    refused = await post(url, {**POOLING_BODIES.get(url, {}), **body}, client)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "model"
    assert words in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("url", "body", "param", "words"),
    [
        ("/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1", "2 queries for 1 documents"),
        ("/score", {"text_1": "a", "text_2": ""}, "text_2", "a text of a pair is empty"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2", "nothing to score"),
        ("/score", {"text_1": "a", "text_2": "x" * MAX_MODEL_LEN}, "text_2", "maximum context length"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "empty list"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "at least 1"),
        ("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 0}, "max_tokens_per_doc", "at least 1"),
        ("/classify", {"input": []}, "input", "empty list"),
        ("/classify", {"input": "a", "use_activation": True, "activation": False}, "activation", "contradict"),
        ("/pooling", {"input": "a", "dimensions": 2}, "dimensions", "only embeddings are cut"),
    ],
)
async def test_what_is_wrong_is_named(url: str, body: dict[str, Any], param: str, words: str) -> None:
    refused = await post(url, body, ClassifyingClient("fits"))
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param
    assert words in refused.json()["error"]["message"]


async def test_a_multi_vector_model_has_its_own_text_before_queries_and_documents() -> None:
    client = PoolingClient(
        kind="all", tasks=("token_embed",), score="late", query_prefix="[Q] ", document_prefix="[D] "
    )
    assert (await post("/rerank", {"query": "ab", "documents": ["ab", "cd"]}, client)).status_code == 200
    assert {bytes(request.token_ids).decode() for request in client.added} == {"[Q] ab", "[D] ab", "[D] cd"}


async def test_step_tags() -> None:
    client = PoolingClient(kind="all", tasks=("token_embed",), score=None)
    body = {"input": "one x two x", "step_tag_id": ord("x")}
    assert (await post("/pooling", body, client)).status_code == 200
    assert [(request.params.pooling, request.params.step_tag_id) for request in client.added] == [("step", ord("x"))]
    absent = await post("/pooling", {**body, "input": "one"}, client)
    assert (absent.status_code, absent.json()["error"]["param"]) == (400, "step_tag_id")
    assert "no token of the prompt" in absent.json()["error"]["message"]
    whole = await post("/pooling", {**body, "task": "embed"}, PoolingClient())
    assert (whole.status_code, whole.json()["error"]["param"]) == (400, "step_tag_id")
