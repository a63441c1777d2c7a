"""The routes of the Responses API."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response as HttpResponse

from quire.server.body import JsonRoute
from quire.server.context import ServerContext
from quire.server.errors import json_response
from quire.server.keyed import KeyedAnswers, folder_of
from quire.server.middleware import owner_of
from quire.server.openai.responses.handler import MOST_ITEMS, Responses
from quire.server.openai.responses.journal import SUFFIX, ResponseJournal
from quire.server.openai.responses.prepare import ROUTE
from quire.server.openai.responses.protocol import Deleted, InputTokens, ItemList, Response, ResponsesRequest
from quire.server.openai.responses.store import MemoryStore
from quire.server.openapi import answers


def responses_router(context: ServerContext) -> APIRouter:
    settings = context.settings
    store = MemoryStore(settings.max_stored_responses, settings.max_stored_bytes)
    service = Responses(context, store, ResponseJournal(folder_of(context, SUFFIX)))
    context.on_ready.append(service.recover)
    keyed = KeyedAnswers(context, ROUTE, ResponsesRequest, service.create)
    router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)
    one = f"{ROUTE}/{{response_id}}"

    @router.post(ROUTE, response_class=HttpResponse, responses=answers(Response, dict))
    async def create(body: ResponsesRequest, request: Request) -> HttpResponse:
        """Answer an input, in one piece, as a stream of server-sent events, or in the background."""
        return await (service.create(body, request) if body.background else keyed.answer(body, request))

    @router.post(f"{ROUTE}/input_tokens", response_class=HttpResponse, responses=answers(InputTokens))
    async def input_tokens(body: ResponsesRequest, request: Request) -> HttpResponse:
        """How many tokens an input is, without answering it."""
        return json_response(await service.count_tokens(body, request))

    @router.get(one, response_class=HttpResponse, responses=answers(Response))
    async def get(
        request: Request,
        response_id: str,
        stream: bool = False,
        starting_after: Annotated[int, Query(ge=-1)] = -1,
    ) -> HttpResponse:
        """A response that was stored; with `stream`, the events of one that runs in the background.

        `starting_after` is the sequence number of the last event that the client has.
        """
        owner = owner_of(request.scope)
        if stream:
            await request.body()  # empty; what comes next is the disconnect
            return service.events(response_id, owner, starting_after)
        return json_response(service.get(response_id, owner))

    @router.delete(one, response_class=HttpResponse, responses=answers(Deleted))
    async def delete(request: Request, response_id: str) -> HttpResponse:
        """Forget a response."""
        return json_response(service.delete(response_id, owner_of(request.scope)))

    @router.post(f"{one}/cancel", response_class=HttpResponse, responses=answers(Response))
    async def cancel(request: Request, response_id: str) -> HttpResponse:
        """Stop a response that runs in the background."""
        return json_response(service.cancel(response_id, owner_of(request.scope)))

    @router.get(f"{one}/input_items", response_class=HttpResponse, responses=answers(ItemList))
    async def input_items(
        request: Request,
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=MOST_ITEMS)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> HttpResponse:
        """What a response answered, page by page."""
        return json_response(service.input_items(response_id, owner_of(request.scope), limit, order, after))

    return router
