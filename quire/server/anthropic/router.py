"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.server.anthropic.handler import ROUTE, count_tokens, create_message
from quire.server.anthropic.protocol import CountTokensRequest, Message, MessagesRequest, StreamEvent, TokenCount
from quire.server.body import JsonRoute
from quire.server.context import ServerContext
from quire.server.errors import AnthropicErrorBody, json_response
from quire.server.openapi import answers


def messages_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["Anthropic"], route_class=JsonRoute)

    @router.post(ROUTE, response_class=Response, responses=answers(Message, StreamEvent, error=AnthropicErrorBody))
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation, in one piece or as a stream of server-sent events."""
        return await create_message(context, body, request)

    @router.post(
        f"{ROUTE}/count_tokens", response_class=Response, responses=answers(TokenCount, error=AnthropicErrorBody)
    )
    async def count(body: CountTokensRequest) -> Response:
        """How many tokens a conversation is, without answering it."""
        return json_response(await count_tokens(context, body))

    return router
