"""The route of text completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.server.body import JsonRoute
from quire.server.context import ServerContext
from quire.server.openai.completions.handler import ROUTE, create_completion
from quire.server.openai.completions.protocol import Completion, CompletionRequest
from quire.server.openapi import answers


def completions_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)

    @router.post(ROUTE, response_class=Response, responses=answers(Completion, Completion))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Go on with a text, in one piece or as a stream of server-sent events."""
        return await create_completion(context, body, request)

    return router
