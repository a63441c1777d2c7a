"""The routes of pooling, classes, scores and ranks."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.server.body import JsonRoute
from quire.server.context import ServerContext
from quire.server.openapi import answers
from quire.server.pooling import handler
from quire.server.pooling.protocol import (
    ClassifyAnswer,
    ClassifyRequest,
    PoolingAnswer,
    PoolingRequest,
    RerankAnswer,
    RerankRequest,
    ScoreAnswer,
    ScoreRequest,
)


def pooling_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["Pooling"], route_class=JsonRoute)

    @router.post("/pooling", response_class=Response, responses=answers(PoolingAnswer))
    async def pooling(body: PoolingRequest, request: Request) -> Response:
        """What the model's task reads of each input: a vector, or one for each of its tokens."""
        return await handler.pool(context, body, request)

    @router.post("/classify", response_class=Response, responses=answers(ClassifyAnswer))
    async def classify(body: ClassifyRequest, request: Request) -> Response:
        """The classes of each input, of a model that classifies."""
        return await handler.classify(context, body, request)

    @router.post("/score", response_class=Response, responses=answers(ScoreAnswer))
    @router.post("/v1/score", response_class=Response, responses=answers(ScoreAnswer))
    async def score(body: ScoreRequest, request: Request) -> Response:
        """How well texts go together, of a reranker or an embedder."""
        return await handler.score(context, body, request)

    @router.post("/rerank", response_class=Response, responses=answers(RerankAnswer))
    @router.post("/v1/rerank", response_class=Response, responses=answers(RerankAnswer))
    async def rerank(body: RerankRequest, request: Request) -> Response:
        """Documents by how well they go with a query, the best first, as Jina's API has it."""
        return await handler.rerank(context, body, request, with_texts=True)

    @router.post("/v2/rerank", response_class=Response, responses=answers(RerankAnswer))
    async def rerank_v2(body: RerankRequest, request: Request) -> Response:
        """The same as Cohere's API has it: without the documents' texts, unless they are asked for."""
        return await handler.rerank(context, body, request, with_texts=False)

    return router
