"""Requests with an Idempotency-Key: one that is sent again returns the answer that is being made, or was.

Such a request goes on without its client, and in a journal it outlives the server, too: the next one goes on after
what was recorded of it. Keys belong to the API key that they came with, and to a route. Knows routes and bytes of
answers.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quire.server.context import ServerContext
from quire.server.detached import DetachedRun
from quire.server.errors import ClientDisconnectedError
from quire.server.generation.fields import GenerationFields
from quire.server.generation.record import Line, Record
from quire.server.journal import JournalFolder, NoFolder, check_folder
from quire.server.middleware import owner_of, request_id_of
from quire.server.sse import EventStream, while_connected
from quire.types.errors import EngineUnavailableError, QuireError, RequestError
from quire.utils.log import get_logger

logger = get_logger(__name__)

HEADER = "Idempotency-Key"
MAX_KEY = 255  # characters

B = TypeVar("B", bound=GenerationFields)


class _Asked(msgspec.Struct, frozen=True):
    """The first line of a file."""

    name: str
    digest: str  # of the request, as it was sent
    owner: str
    request_id: str
    own_request_id: bool  # not chosen by the client
    created: int
    id_suffix: str
    body: dict[str, Any]


class _Answered(msgspec.Struct, frozen=True, tag="answered"):
    """The last line of a file, in place of the record."""

    status: int
    headers: list[tuple[str, str]]
    body: str


class KeyedAnswer(DetachedRun):
    """One answer as it is sent, for clients that come while it is made or later."""

    def __init__(self, digest: str) -> None:
        super().__init__()
        self.digest = digest
        self.start: Message | None = None
        self._error: Exception | None = None

    async def begun(self) -> Message:
        """The message with status and headers; raises what went wrong before it."""
        while self.start is None:
            if self._error is not None:
                raise self._error
            if self.is_done:
                raise EngineUnavailableError("the server has stopped the request; send it again")
            await self.wait()
        return self.start

    async def send(self, message: Message) -> None:
        """Take in a message of the application."""
        if message["type"] == "http.response.start":
            self.start = message
            self.add(())
        elif message.get("body"):
            self.add([message["body"]])

    def fail(self, error: Exception) -> None:
        """It ended with an error, which those hear who wait for its beginning."""
        self._error = error
        self.finish()


class _Replay(Response):
    """Sends an answer from its beginning."""

    def __init__(self, answer: KeyedAnswer, start: Message) -> None:
        super().__init__()
        self._answer = answer
        self._start = start

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send))
        except ClientDisconnectedError:
            scope["state"]["client_gone"] = True  # for the access log; the status has been sent

    async def _send(self, send: Send) -> None:
        await send({**self._start})
        async for chunk in self._answer.read():
            if chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class KeyedAnswers(Generic[B]):
    """The keyed requests of one route. `handle` answers a request whose body was read and whose client stays."""

    def __init__(
        self,
        context: ServerContext,
        route: str,
        model: type[B],
        handle: Callable[[B, Request], Awaitable[Response]],
    ) -> None:
        self._context = context
        self._route = route
        self._model = model
        self._handle = handle
        self._answers: OrderedDict[str, KeyedAnswer] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._folder = folder_of(context, "." + route.removeprefix("/v1/").replace("/", "_"))
        self._left: list[tuple[_Asked, KeyedAnswer, Record]] = []
        for path, lines in self._folder.read():
            try:
                self._take(lines)
                self._trim()
            except (IndexError, msgspec.MsgspecError) as error:
                logger.warning("%s in the journal cannot be used: %s", path.name, error)
        context.on_ready.append(self.recover)

    async def answer(self, body: B, request: Request) -> Response:
        key = request.headers.get(HEADER)
        if key is None:
            return await self._handle(body, request)
        if len(key) > MAX_KEY:
            raise RequestError(f"the key has {len(key)} characters; give one of at most {MAX_KEY} characters", HEADER)
        sent = body.model_dump(mode="json", exclude_unset=True)
        digest = hashlib.sha256(msgspec.json.encode(sent, order="sorted")).hexdigest()
        owner = owner_of(request.scope)
        name = hashlib.sha256(msgspec.json.encode((owner, key))).hexdigest()
        found = self._answers.get(name)
        if found is None:
            if body.seed is None:  # the answer must be the same if another process has to give it
                body = body.model_copy(update={"seed": secrets.randbits(31)})
            sent["seed"] = body.seed
            record = Record(self._folder.writer(name))
            asked = _Asked(
                name,
                digest,
                owner,
                request_id_of(request.scope),
                bool(request.state.own_request_id),
                record.created,
                record.id_suffix,
                sent,
            )
            found = self._answers[name] = KeyedAnswer(digest)
            self._trim()
            self._folder.open(name, msgspec.json.encode(asked))
            self._start(name, found, body, request.scope, record)
        elif found.digest != digest:
            raise RequestError("this key came with another request before; give another key", HEADER)
        return _Replay(found, await while_connected(request.receive, found.begun()))

    async def recover(self) -> None:
        """Go on with what the process before has not finished."""
        for name in self._answers:
            self._folder.expire_later(name)
        left, self._left = self._left, []
        for asked, answer, record in left:
            state = {
                "request_id": asked.request_id,
                "own_request_id": asked.own_request_id,
                "arrival_time": time.monotonic(),
                "owner": asked.owner,
            }
            scope = {"type": "http", "method": "POST", "path": self._route, "headers": [], "state": state}
            try:
                body = self._model.model_validate(asked.body)
            except ValueError as error:
                logger.warning("%s cannot go on: %s", asked.request_id, error)
                answer.fail(QuireError(f"the request cannot go on: {error}"))
                self._forget(asked.name)
                continue
            self._start(asked.name, answer, body, scope, record)

    def _take(self, lines: list[bytes]) -> None:
        """Register what a file holds; requests that come before the engine is there wait for it."""
        asked = msgspec.json.decode(lines[0], type=_Asked)
        known: list[Line] = []
        end: _Answered | None = None
        for line in lines[1:]:
            try:
                found = _LINES.decode(line)
            except msgspec.MsgspecError as error:
                logger.warning("the journal of %s ends where it cannot be read: %s", asked.request_id, error)
                break
            if isinstance(found, _Answered):
                end = found
            else:
                known.append(found)
        answer = self._answers[asked.name] = KeyedAnswer(asked.digest)
        if end is None:
            write = self._folder.writer(asked.name)
            record = Record(write, known, created=asked.created, id_suffix=asked.id_suffix)
            self._left.append((asked, answer, record))
            return
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in end.headers]
        answer.start = {"type": "http.response.start", "status": end.status, "headers": headers}
        answer.add([end.body.encode()])
        answer.finish()

    def _start(self, name: str, answer: KeyedAnswer, body: B, scope: Scope, record: Record) -> None:
        async def never() -> Message:
            await asyncio.Event().wait()
            raise AssertionError("the client of a keyed request does not go away")

        async def work() -> None:
            try:
                own = {**scope, "state": {**scope["state"], "record": record}}
                response = await self._handle(body, Request(own, never))
                await response(own, never, answer.send)
            except Exception as error:  # whoever waits for the answer gets it
                answer.fail(error)
                self._forget(name, answer)
            else:
                if answer.start is None or (isinstance(response, EventStream) and response.has_failed):
                    self._forget(name, answer)
                else:
                    self._keep(name, answer, answer.start)
            finally:
                answer.finish()

        self._folder.expire_later(name)
        task = asyncio.create_task(work(), name=f"{self._route} {request_id_of(scope)}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _keep(self, name: str, answer: KeyedAnswer, start: Message) -> None:
        headers = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in start["headers"]]
        end = _Answered(start["status"], headers, b"".join(answer.events).decode())
        self._folder.finish(name, msgspec.json.encode(end))
        self._folder.expire_later(name)

    def _forget(self, name: str, answer: KeyedAnswer | None = None) -> None:
        if answer is None or self._answers.get(name) is answer:
            self._answers.pop(name, None)
            self._folder.delete(name)

    def _trim(self) -> None:
        """The oldest that are done go, when there are too many or too long ones, and their files with them."""
        settings = self._context.settings
        num_bytes = sum(answer.num_bytes for answer in self._answers.values())
        for name, answer in list(self._answers.items()):
            if len(self._answers) <= max(1, settings.max_stored_responses) and num_bytes <= settings.max_stored_bytes:
                return
            if answer.is_done:
                num_bytes -= answer.num_bytes
                del self._answers[name]
                self._folder.delete(name)


def folder_of(context: ServerContext, suffix: str) -> JournalFolder:
    """The journal's files of one kind, as the server is set up."""
    settings = context.settings
    if settings.journal is None:
        return NoFolder()
    folder = Path(settings.journal).expanduser()
    check_folder(folder)
    return JournalFolder(folder, suffix, settings.journal_ttl, context.observer.on_journal_failure)


_LINES: msgspec.json.Decoder[Line | _Answered] = msgspec.json.Decoder(Line | _Answered)
