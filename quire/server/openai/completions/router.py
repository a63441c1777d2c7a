"""The routes of text completions."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.server.body import JsonRoute
from quire.server.context import ServerContext
from quire.server.errors import json_response
from quire.server.keyed import KeyedAnswers
from quire.server.openai.completions.handler import ROUTE, create_completion, make_generation
from quire.server.openai.completions.protocol import Completion, CompletionRequest
from quire.server.openai.render import Rendered, render
from quire.server.openapi import answers
from quire.server.sse import while_connected


def completions_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)
    keyed = KeyedAnswers(context, ROUTE, CompletionRequest, partial(create_completion, context))

    @router.post(ROUTE, response_class=Response, responses=answers(Completion, Completion))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Go on with a text, in one piece or as a stream of server-sent events."""
        return await keyed.answer(body, request)

    @router.post(f"{ROUTE}/render", response_class=Response, responses=answers(list[Rendered]))
    async def render_prompts(body: CompletionRequest, request: Request) -> Response:
        """The token ids of each prompt, without going on with it."""
        rendered = await while_connected(request.receive, render(context, make_generation(context, body, request)))
        return json_response(rendered)

    return router
