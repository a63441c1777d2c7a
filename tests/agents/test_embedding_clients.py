"""Client libraries that embed and rerank: those that users have, against the real routes."""

from __future__ import annotations

import cohere
import httpx
import pytest
from langchain_openai import OpenAIEmbeddings

from tests.frontend.fake_client import ClassifyingClient, FakeClient, PoolingClient
from tests.server.helpers import MODEL, http, make_app

DOCUMENTS = ["cd", "xx", "xb"]


def client_of(engine: FakeClient) -> httpx.AsyncClient:
    return http(make_app(engine))


async def test_langchain_embeds_documents_and_queries() -> None:
    async with client_of(PoolingClient()) as session:
        embeddings = OpenAIEmbeddings(
            model=MODEL,
            api_key="none",
            base_url="http://quire/v1",
            http_async_client=session,
            check_embedding_ctx_length=False,
        )
        assert await embeddings.aembed_documents(["Hi", "you"]) == [[2.0, 72.0, 105.0], [3.0, 121.0, 117.0]]
        assert await embeddings.aembed_query("Hi") == [2.0, 72.0, 105.0]


async def test_cohere_reranks() -> None:
    async with client_of(ClassifyingClient("fits")) as session:
        client = cohere.AsyncClientV2(api_key="none", base_url="http://quire", httpx_client=session)
        answer = await client.rerank(model=MODEL, query="xx", documents=DOCUMENTS, top_n=2)
    assert [(item.index, item.relevance_score) for item in answer.results] == [(1, 1.0), (2, 0.75)]


async def test_the_old_cohere_client_reranks_too() -> None:
    async with client_of(ClassifyingClient("fits")) as session:
        client = cohere.AsyncClient(api_key="none", base_url="http://quire", httpx_client=session)
        answer = await client.rerank(model=MODEL, query="xx", documents=DOCUMENTS, return_documents=True)
    assert [item.document.text for item in answer.results if item.document] == ["xx", "xb", "cd"]


async def test_cohere_hears_why_a_request_is_refused() -> None:
    async with client_of(PoolingClient(score=None, tasks=("token_classify",))) as session:
        client = cohere.AsyncClientV2(api_key="none", base_url="http://quire", httpx_client=session)
        with pytest.raises(cohere.BadRequestError, match="token_classify"):
            await client.rerank(model=MODEL, query="xx", documents=DOCUMENTS)
