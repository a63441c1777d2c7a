"""The routes of chat completions."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.server.body import JsonRoute
from quire.server.context import ServerContext
from quire.server.errors import json_response
from quire.server.keyed import KeyedAnswers
from quire.server.openai.chat.handler import ROUTE, create_chat_completion, make_generation
from quire.server.openai.chat.protocol import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from quire.server.openai.render import Rendered, render
from quire.server.openapi import answers
from quire.server.sse import while_connected


def chat_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)
    keyed = KeyedAnswers(context, ROUTE, ChatCompletionRequest, partial(create_chat_completion, context))

    @router.post(ROUTE, response_class=Response, responses=answers(ChatCompletion, ChatCompletionChunk))
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation, in one piece or as a stream of server-sent events."""
        return await keyed.answer(body, request)

    @router.post(f"{ROUTE}/render", response_class=Response, responses=answers(Rendered))
    async def render_chat(body: ChatCompletionRequest, request: Request) -> Response:
        """The prompt that a conversation becomes, as token ids, without answering it."""
        generation, _ = await make_generation(context, body, request)
        (rendered,) = await while_connected(request.receive, render(context, generation))
        return json_response(rendered)

    return router
