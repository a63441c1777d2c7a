"""POST /invocations, the one route that Amazon SageMaker calls: chat or completion, by the fields of the body."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.server.body import JsonRoute
from quire.server.context import ServerContext
from quire.server.generation.fields import Texts, TokenIdLists, TokenIds
from quire.server.openai.chat.handler import create_chat_completion
from quire.server.openai.chat.protocol import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from quire.server.openai.completions.handler import create_completion
from quire.server.openai.completions.protocol import Completion, CompletionRequest
from quire.server.openapi import answers


class PromptRequest(CompletionRequest):
    """A completion request: its prompt distinguishes it from a chat request."""

    prompt: str | TokenIds | Texts | TokenIdLists


def invocations_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["SageMaker"], route_class=JsonRoute)

    @router.post(
        "/invocations",
        response_class=Response,
        responses=answers(ChatCompletion | Completion, ChatCompletionChunk | Completion),
    )
    async def invocations(body: ChatCompletionRequest | PromptRequest, request: Request) -> Response:
        """A chat completion for `messages`, a completion for `prompt`."""
        if isinstance(body, ChatCompletionRequest):
            return await create_chat_completion(context, body, request)
        return await create_completion(context, body, request)

    return router
