"""The route of embeddings."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.server.body import JsonRoute
from quire.server.context import ServerContext
from quire.server.openai.embeddings.handler import ROUTE, create_embeddings
from quire.server.openai.embeddings.protocol import Embeddings, EmbeddingsRequest
from quire.server.openapi import answers


def embeddings_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)

    @router.post(ROUTE, response_class=Response, responses=answers(Embeddings))
    async def embeddings(body: EmbeddingsRequest, request: Request) -> Response:
        """A vector of each input, of a model that embeds."""
        return await create_embeddings(context, body, request)

    return router
