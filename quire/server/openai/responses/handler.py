"""The Responses API: makes, keeps, finds, cancels and forgets responses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from quire.server.context import ServerContext
from quire.server.conversation.prepare import prepare_conversation
from quire.server.errors import NotFoundError, json_response
from quire.server.middleware import arrival_time_of, request_id_of, trace_headers_of
from quire.server.openai.generation import Generation, unique_id
from quire.server.openai.logprobs import LogprobsFormatter
from quire.server.openai.responses.convert import conversation_of, response_of, toolbox_of
from quire.server.openai.responses.events import Event, ResponseEvents
from quire.server.openai.responses.items import Item, items_of
from quire.server.openai.responses.protocol import Deleted, ItemList, Response, ResponseError, ResponsesRequest
from quire.server.openai.responses.run import Turn, run_turn
from quire.server.openai.responses.store import ResponseStore, StoredResponse
from quire.server.openai.responses.truncation import fitted
from quire.server.openai.sampling import check_logprobs
from quire.server.sse import EventStream, named_event, while_connected
from quire.types.errors import QuireError, RequestError
from quire.types.sampling import SamplingParams
from quire.utils.log import get_logger

logger = get_logger(__name__)

ROUTE = "/v1/responses"
MOST_ITEMS = 100  # of a page of input items
# What is understood and has no meaning here, or is only a hint.
HINTS = frozenset({"stream_options", "prompt_cache_retention", "prompt_cache_options", "client_metadata"})
UNSUPPORTED = {
    "conversation": "send previous_response_id, or all items as input",
    "prompt": "send the prompt's text as instructions and input",
}


class Responses:
    """All responses of one server."""

    def __init__(self, context: ServerContext, store: ResponseStore) -> None:
        self._context = context
        self._store = store
        self._running: dict[str, asyncio.Task[None]] = {}  # in the background

    async def create(self, body: ResponsesRequest, request: Request) -> HttpResponse:
        turn = await while_connected(request.receive, self._prepare(body, request))
        if body.background:
            return self._start(turn)
        if body.stream:
            return EventStream(self._encoded(turn), end=b"")
        await while_connected(request.receive, self._finish(turn))
        return json_response(msgspec.json.encode(turn.response))

    def get(self, response_id: str) -> Response:
        return self._find(response_id).response

    def delete(self, response_id: str) -> Deleted:
        self._find(response_id)
        self._stop(response_id)
        self._store.delete(response_id)
        return Deleted(response_id)

    def cancel(self, response_id: str) -> Response:
        stored = self._find(response_id)
        if not stored.response.background:
            raise RequestError(
                f"{response_id} does not run in the background; close its connection to cancel it", "response_id"
            )
        if self._stop(response_id):
            stored.response.status = "cancelled"
        return stored.response

    def input_items(self, response_id: str, limit: int, order: str, after: str | None) -> ItemList:
        """A page of what the response answered."""
        stored = self._find(response_id)
        items = [
            item if "id" in item else {**item, "id": f"item_{response_id.removeprefix('resp_')}_{index}"}
            for index, item in enumerate([*stored.context, *stored.input])
        ]
        if order == "desc":
            items.reverse()
        ids = [item["id"] for item in items]
        if after is not None and after not in ids:
            raise NotFoundError(f"{response_id} has no input item {after[:100]!r}", "after")
        begin = 0 if after is None else ids.index(after) + 1
        page = items[begin : begin + limit]
        more = begin + limit < len(items)
        return ItemList(page, page[0]["id"] if page else None, page[-1]["id"] if page else None, more)

    async def _prepare(self, body: ResponsesRequest, request: Request) -> Turn:
        context = self._context
        model = context.check_model(body.model)
        self._check_extra_fields(body)
        check_logprobs("top_logprobs", body.top_logprobs, context.settings.max_logprobs)
        response_id = f"resp_{request_id_of(request.scope)}"
        if not request.state.own_request_id:
            response_id = unique_id(response_id)
        response = response_of(body, response_id, int(time.time()), model)
        previous = self._previous(body.previous_response_id)
        items = items_of(body.input)
        toolbox = toolbox_of(body.tools)
        conversation = conversation_of(context, body, [*previous, *items], toolbox)
        params = self._params(body)
        if body.truncation == "auto":
            room = context.provider.engine.info.max_model_len - min(body.max_output_tokens or 1, 1 << 10)
            conversation = await fitted(context, conversation, max(1, room))
        prepared = await prepare_conversation(context, conversation, params)
        prompt: dict[str, Any] = {"prompt": prepared.prompt}
        if body.cache_salt is not None:
            prompt["cache_salt"] = body.cache_salt
        generation = Generation(
            response_id=response_id,
            engine_id=response_id,
            model=model,
            prompts=[prompt],
            prompt_field="input",
            format_field=prepared.format_field,
            params=prepared.params,
            priority=0,
            add_special_tokens=False,
            trace_headers=trace_headers_of(request.scope),
            arrival_time=arrival_time_of(request.scope),
        )
        included = body.include or ()
        events = ResponseEvents(
            response,
            as_summary=body.reasoning is not None
            and (body.reasoning.summary or body.reasoning.generate_summary) is not None,
            with_encrypted="reasoning.encrypted_content" in included,
            namespaces=toolbox.namespaces,
        )
        formatter = None if params.logprobs is None else LogprobsFormatter(context.tokenizer(), False)
        return Turn(
            generation=generation,
            prepared=prepared,
            events=events,
            previous=previous,
            items=items,
            formatter=formatter,
        )

    def _params(self, body: ResponsesRequest) -> SamplingParams:
        given: dict[str, Any] = {"temperature": body.temperature, "top_p": body.top_p, "output_kind": "delta"}
        if body.max_output_tokens is not None:
            given["max_tokens"] = min(body.max_output_tokens, self._context.provider.engine.info.max_model_len)
        if body.top_logprobs or "message.output_text.logprobs" in (body.include or ()):
            given["logprobs"] = body.top_logprobs or 0
        named = {name: value for name, value in given.items() if value is not None}
        return msgspec.structs.replace(self._context.text.chat_params(), **named)

    def _check_extra_fields(self, body: ResponsesRequest) -> None:
        for name, value in (body.model_extra or {}).items():
            if name in UNSUPPORTED and value is not None:
                raise RequestError(f"{name} is not supported by this server; {UNSUPPORTED[name]}", name)
            if name not in HINTS and name not in UNSUPPORTED:
                self._context.note_ignored_field(ROUTE, name)

    def _previous(self, response_id: str | None) -> list[Item]:
        if response_id is None:
            return []
        stored = self._find(response_id, "previous_response_id")
        if stored.response.status in ("queued", "in_progress"):
            raise RequestError(
                f"{response_id} is still {stored.response.status}; wait until it is completed", "previous_response_id"
            )
        return stored.conversation()

    def _find(self, response_id: str, field: str = "response_id") -> StoredResponse:
        stored = self._store.get(response_id)
        if stored is None:
            raise NotFoundError(
                f"there is no response {response_id[:100]!r}: it was not stored, deleted, or made room for others",
                field,
            )
        return stored

    async def _encoded(self, turn: Turn) -> AsyncGenerator[bytes, None]:
        async with aclosing(run_turn(self._context, turn)) as batches:
            async for events in batches:
                self._keep_if_done(turn)
                yield b"".join(_encode(event) for event in events)

    async def _finish(self, turn: Turn) -> None:
        async with aclosing(run_turn(self._context, turn)) as batches:
            async for _ in batches:
                self._keep_if_done(turn)

    def _keep_if_done(self, turn: Turn) -> None:
        response = turn.response
        if response.store and response.status not in ("queued", "in_progress"):
            self._store.put(StoredResponse(response, turn.previous, turn.items))

    def _start(self, turn: Turn) -> HttpResponse:
        """Answer at once with a queued response, and go on without the client."""
        response_id = turn.response.id
        self._store.put(StoredResponse(turn.response, turn.previous, turn.items))
        body = msgspec.json.encode(turn.response)

        async def work() -> None:
            try:
                await self._finish(turn)
            except QuireError as error:
                logger.warning("%s failed in the background: %s", response_id, error)
                turn.response.status = "failed"
                turn.response.error = _error(error)
            finally:
                del self._running[response_id]

        self._running[response_id] = asyncio.create_task(work(), name=response_id)
        return json_response(body)

    def _stop(self, response_id: str) -> bool:
        """Whether it was running."""
        task = self._running.get(response_id)
        return task is not None and task.cancel()


def _error(error: QuireError) -> ResponseError:
    return ResponseError("invalid_prompt" if isinstance(error, RequestError) else "server_error", str(error))


def _encode(event: Event) -> bytes:
    return named_event(event["type"], msgspec.json.encode(event))
