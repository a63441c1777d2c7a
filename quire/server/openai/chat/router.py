"""The route of chat completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.server.body import JsonRoute
from quire.server.context import ServerContext
from quire.server.openai.chat.handler import ROUTE, create_chat_completion
from quire.server.openai.chat.protocol import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from quire.server.openapi import answers


def chat_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)

    @router.post(ROUTE, response_class=Response, responses=answers(ChatCompletion, ChatCompletionChunk))
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation, in one piece or as a stream of server-sent events."""
        return await create_chat_completion(context, body, request)

    return router
