"""The Responses API: makes, keeps, finds, cancels and forgets responses."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from quire.server.context import ServerContext
from quire.server.conversation.prepare import num_tokens
from quire.server.detached import DetachedRun, DetachedRuns
from quire.server.errors import NotFoundError, json_response
from quire.server.generation.record import Heard, Record, record_of
from quire.server.generation.request import Origin, ids_of, origin_of
from quire.server.middleware import owner_of
from quire.server.openai.logprobs import LogprobsFormatter
from quire.server.openai.responses.convert import response_of, toolbox_of
from quire.server.openai.responses.events import Event, ResponseEvents
from quire.server.openai.responses.items import Item, items_of, response_id_of
from quire.server.openai.responses.journal import JournalEntry, ResponseJournal
from quire.server.openai.responses.mcp import list_remote_tools
from quire.server.openai.responses.prepare import TurnMaker, check_fields, max_tokens_of, params_of
from quire.server.openai.responses.protocol import Deleted, InputTokens, ItemList, Response, ResponsesRequest
from quire.server.openai.responses.run import Plan, begin, fail, run_response
from quire.server.openai.responses.store import ResponseStore, StoredResponse
from quire.server.openai.sampling import check_logprob_token_ids, check_logprobs
from quire.server.sse import KEEP_ALIVE, EventStream, named_event, while_connected
from quire.types.errors import EngineUnavailableError, QuireError, RequestError
from quire.utils.log import get_logger

logger = get_logger(__name__)

MOST_ITEMS = 100  # of a page of input items
# Codex gives up after 300 seconds without an event, and ignores comments: send an event every minute.
LOOKS_PER_EVENT = 12


class Responses:
    """All responses of one server."""

    def __init__(self, context: ServerContext, store: ResponseStore, journal: ResponseJournal) -> None:
        self._context = context
        self._store = store
        self._journal = journal
        self._runs = DetachedRuns(context.settings.max_stored_bytes)
        self._keys: OrderedDict[tuple[str, str], str] = OrderedDict()  # owner and idempotency key -> response
        self._running: dict[str, asyncio.Task[None]] = {}  # in the background
        self._has_recovered = False

    async def create(self, body: ResponsesRequest, request: Request) -> HttpResponse:
        """Keys are those of background responses here; others are kept apart, see KeyedAnswers."""
        owner = owner_of(request.scope)
        key = request.headers.get("idempotency-key") if body.background else None
        if key is not None and (known := self._keys.get((owner, key))) is not None:
            return self._again(known, owner, body)
        # An id that a client chose may come twice, and stored responses are found by it.
        response_id = ids_of("resp_", body, request).engine
        if key is not None:
            self._remember(owner, key, response_id)
        if body.background and body.seed is None:
            # The answer must be the same if another process has to give it.
            body = body.model_copy(update={"seed": secrets.randbits(31)})
        try:
            record = self._journal.record(response_id) if body.background else record_of(request)
            work = self._prepare(body, response_id, origin_of(request), owner, record)
            plan = await while_connected(request.receive, work)
            if body.background:
                return self._open(plan, key)
            if body.stream:
                return self._stream(plan)
            await while_connected(request.receive, self._finish(plan))
            return json_response(plan.response)
        except BaseException:
            if key is not None:
                self._keys.pop((owner, key), None)
            raise

    async def recover(self) -> None:
        """Take over what the process before has left in the journal: answers, and requests to be answered."""
        for journaled in self._journal.read():
            entry = journaled.entry
            if entry.key is not None:
                self._remember(entry.owner, entry.key, entry.response_id)
            if journaled.stored is not None:
                self._store.put(journaled.stored)
                self._journal.folder.expire_later(entry.response_id)
                continue
            try:
                body = ResponsesRequest.model_validate(entry.body)
                origin = Origin(time.monotonic(), None, entry.owner or None)
                known = [Heard(entry.context, entry.input), *journaled.lines]
                record = self._journal.record(entry.response_id, known, created=entry.created)
                plan = await self._prepare(body, entry.response_id, origin, entry.owner, record)
                self._store.put(_stored(plan))
                self._start(plan)
                logger.info("%s goes on", entry.response_id)
            except (QuireError, ValueError) as error:
                logger.warning("%s cannot go on: %s", entry.response_id, error)
                self._journal.folder.delete(entry.response_id)
        self._has_recovered = True

    def _remember(self, owner: str, key: str, response_id: str) -> None:
        self._keys[owner, key] = response_id
        while len(self._keys) > max(1, self._context.settings.max_stored_responses):
            self._keys.popitem(last=False)

    def _again(self, response_id: str, owner: str, body: ResponsesRequest) -> HttpResponse:
        """Answer a request that was asked before, under the same idempotency key, with what came or comes of it."""
        stored = self._store.get(response_id)
        if stored is None or stored.owner != owner:
            raise RequestError(
                "the response to the request with this Idempotency-Key is not kept any more; give another key",
                "Idempotency-Key",
            )
        if body.stream and self._runs.get(response_id) is not None:
            return self.events(response_id, owner, -1)
        return json_response(stored.response)

    def events(self, response_id: str, owner: str, starting_after: int) -> EventStream:
        """The events of a background response behind a sequence number, to its end."""
        self._find(response_id, owner)
        run = self._runs.get(response_id)
        if run is None and (events := self._journal.events(response_id)) is not None:
            run = self._runs.open(response_id)
            run.add(events)
            run.finish()
        if run is None:
            raise RequestError(
                f"the events of {response_id} are not kept: it ran with its client, or made room for others",
                "stream",
            )
        return EventStream(run.read(starting_after), end=b"")

    async def count_tokens(self, body: ResponsesRequest, request: Request) -> InputTokens:
        """The number of prompt tokens of a response, also beyond what the model takes."""
        response_id = ids_of("resp_", body, request).engine
        origin, owner = origin_of(request), owner_of(request.scope)
        plan = await while_connected(request.receive, self._prepare(body, response_id, origin, owner, Record()))
        return InputTokens(await num_tokens(self._context, plan.first.prepared.prompt))

    def get(self, response_id: str, owner: str) -> Response:
        return self._find(response_id, owner).response

    def delete(self, response_id: str, owner: str) -> Deleted:
        self._find(response_id, owner)
        self._stop(response_id)
        self._runs.forget(response_id)
        self._journal.folder.delete(response_id)
        self._store.delete(response_id)
        return Deleted(response_id)

    def cancel(self, response_id: str, owner: str) -> Response:
        stored = self._find(response_id, owner)
        if not stored.response.background:
            raise RequestError(
                f"{response_id} does not run in the background; close its connection to cancel it", "response_id"
            )
        if self._stop(response_id):
            stored.response.status = "cancelled"
            self._journal.folder.delete(response_id)
        return stored.response

    def input_items(self, response_id: str, owner: str, limit: int, order: str, after: str | None) -> ItemList:
        """A page of what the response answered."""
        stored = self._find(response_id, owner)
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

    async def _prepare(
        self, body: ResponsesRequest, response_id: str, origin: Origin, owner: str, record: Record
    ) -> Plan:
        context = self._context
        model = context.check_model(body.model, "generate")
        check_fields(context, body)
        check_logprobs("top_logprobs", body.top_logprobs, context.settings.max_logprobs)
        response = response_of(body, response_id, record.created, model)
        previous, items = self._heard(body, owner, record)
        toolbox = toolbox_of(body.tools, await list_remote_tools(context.tool_servers, body.tools))
        params = params_of(context, body)
        check_logprob_token_ids(params, context.settings.max_logprobs)
        maker = TurnMaker(
            context=context,
            body=body,
            response_id=response_id,
            model=model,
            toolbox=toolbox,
            params=params,
            items=[*previous, *items],
            origin=origin,
            record=record,
        )
        max_tokens = max_tokens_of(context, body)
        reasoning = body.reasoning
        return Plan(
            maker=maker,
            first=await maker.make(0, [], max_tokens=max_tokens),
            events=ResponseEvents(
                response,
                as_summary=reasoning is not None and (reasoning.summary or reasoning.generate_summary) is not None,
                with_encrypted="reasoning.encrypted_content" in (body.include or ()),
                namespaces=toolbox.namespaces,
                remote=toolbox.remote,
            ),
            previous=previous,
            items=items,
            formatter=None
            if params.logprobs is None
            else LogprobsFormatter(
                context.tokenizer(), bool(body.return_tokens_as_token_ids), params.logprob_token_ids
            ),
            max_tokens=max_tokens,
            owner=owner,
        )

    def _heard(self, body: ResponsesRequest, owner: str, record: Record) -> tuple[list[Item], list[Item]]:
        """What was said in the responses before, and the input with what it refers to."""
        if record.heard is None:
            previous, given = self._previous(body.previous_response_id, owner), items_of(body.input)
            items = [self._resolved(item, owner, f"input[{index}]") for index, item in enumerate(given)]
            if previous or items != given:
                record.add(Heard(previous, items))
            return previous, items
        return record.heard.context, record.heard.input

    def _resolved(self, item: Item, owner: str, where: str) -> Item:
        """The item itself, or the output item of a stored response that it refers to."""
        if item.get("type") != "item_reference":
            return item
        item_id = str(item.get("id"))
        stored = self._store.get(response_id_of(item_id))
        if stored is not None and stored.owner == owner:
            for said in msgspec.to_builtins(stored.response.output):
                if said["id"] == item_id:
                    found: Item = said
                    return found
        raise NotFoundError(
            f"{where} refers to {item_id[:100]!r}, which no stored response has; send the item itself", f"{where}.id"
        )

    def _previous(self, response_id: str | None, owner: str) -> list[Item]:
        if response_id is None:
            return []
        stored = self._find(response_id, owner, "previous_response_id")
        if stored.response.status in ("queued", "in_progress"):
            raise RequestError(
                f"{response_id} is still {stored.response.status}; wait until it is completed", "previous_response_id"
            )
        return stored.conversation()

    def _find(self, response_id: str, owner: str, field: str = "response_id") -> StoredResponse:
        stored = self._store.get(response_id)
        if stored is None or stored.owner != owner:  # whose id it is must not be learned either
            if not self._has_recovered and self._journal.owner(response_id) == owner:
                raise EngineUnavailableError(f"{response_id} goes on as soon as the engine has started; ask again")
            raise NotFoundError(
                f"there is no response {response_id[:100]!r}: it was not stored, deleted, or made room for others",
                field,
            )
        return stored

    def _stream(self, plan: Plan) -> EventStream:
        looks = itertools.count(1)

        def keep_alive() -> bytes:
            is_due = next(looks) % LOOKS_PER_EVENT == 0
            return _encode(plan.events.in_progress()) if is_due else KEEP_ALIVE

        return EventStream(
            self._encoded(plan),
            opening=lambda: b"".join(map(_encode, begin(plan))),
            keep_alive=keep_alive,
            failed=lambda error: _encode(self._fail(plan, error)),
            end=b"",
        )

    async def _encoded(self, plan: Plan) -> AsyncGenerator[bytes, None]:
        async with aclosing(run_response(self._context, plan)) as batches:
            async for events in batches:
                self._keep_if_done(plan)
                yield b"".join(map(_encode, events))

    async def _finish(self, plan: Plan) -> None:
        try:
            async with aclosing(run_response(self._context, plan)) as batches:
                async for _ in batches:
                    self._keep_if_done(plan)
        except QuireError as error:
            if not plan.events.has_begun:
                raise
            self._fail(plan, error)

    def _fail(self, plan: Plan, error: QuireError) -> Event:
        """Fail a response whose stream has begun, and return its last event."""
        last = fail(plan, error)
        self._keep_if_done(plan)
        return last

    def _keep_if_done(self, plan: Plan) -> None:
        response = plan.response
        if response.store and response.status not in ("queued", "in_progress"):
            self._store.put(_stored(plan))

    def _open(self, plan: Plan, key: str | None) -> HttpResponse:
        """Answer at once, with a queued response or its events, and go on without the client."""
        response_id, body = plan.response.id, plan.maker.body
        self._store.put(_stored(plan))
        if self._store.get(response_id) is None:
            raise RequestError(
                "background is set but this response cannot be kept, so nobody could ask for the answer; the server"
                " can allow it (--max-stored-responses, --max-stored-bytes)",
                "background",
            )
        created, asked = plan.response.created_at, body.model_dump(mode="json", exclude_unset=True)
        self._journal.open(JournalEntry(response_id, plan.owner, key, created, asked, plan.previous, plan.items))
        queued = msgspec.json.encode(plan.response)
        run = self._start(plan)
        return EventStream(run.read(), end=b"") if body.stream else json_response(queued)

    def _start(self, plan: Plan) -> DetachedRun:
        """Answer a request in the background, from the end of its record on."""
        response_id = plan.response.id
        self._journal.folder.expire_later(response_id)
        run = self._runs.open(response_id)

        async def work() -> None:
            try:
                async with aclosing(run_response(self._context, plan)) as batches:
                    async for events in batches:
                        self._keep_if_done(plan)
                        run.add(map(_encode, events))
            except QuireError as error:
                logger.warning("%s failed in the background: %s", response_id, error)
                last = fail(plan, error)
                run.add([_encode(last)])
            finally:
                run.finish()
                del self._running[response_id]
            self._journal.finish(response_id, plan.response, run.events)
            self._journal.folder.expire_later(response_id)

        self._running[response_id] = asyncio.create_task(work(), name=response_id)
        return run

    def _stop(self, response_id: str) -> bool:
        """Whether it was running."""
        task = self._running.get(response_id)
        return task is not None and task.cancel()


def _stored(plan: Plan) -> StoredResponse:
    return StoredResponse(plan.response, plan.previous, plan.items, owner=plan.owner)


def _encode(event: Event) -> bytes:
    return named_event(event["type"], msgspec.json.encode(event))
