"""A streaming client of OpenAI-compatible servers that measures as it reads and costs little per chunk.

Knows HTTP and server-sent events; knows nothing of load, statistics or any particular server.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Self

import msgspec

from quire.bench.data import Sample
from quire.bench.options import TargetOptions
from quire.bench.records import RequestRecord
from quire.types.errors import BenchmarkError, ConfigError

if TYPE_CHECKING:
    from aiohttp import ClientSession

_MESSAGE_LENGTH = 300  # of a server's error message
_READY_POLL_SECONDS = 0.25


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def has_token(self) -> bool:
        """Whether the chunk brought part of the answer; a token that is half a letter may bring an empty text."""
        delta = self.delta
        if delta is None:
            return bool(self.text) or self.finish_reason is None
        if delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls:
            return True
        return delta.role is None and self.finish_reason is None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


clock = time.perf_counter  # not the loop's: uvloop's counts milliseconds
_decode = msgspec.json.Decoder(_Chunk).decode


class StreamError(Exception):
    """The stream is not what it should be. Becomes the record's `error` and `message`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class EventStream:
    """Reads server-sent events from pieces of any size, each with the time at which it came."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last: float | None = None
        self.gaps: list[float] = []
        self.usage: _Usage | None = None
        self.finished = False  # the server said that the answer is complete
        self._rest = b""

    @property
    def num_chunks(self) -> int:
        return len(self.gaps) + (self.first is not None)

    def feed(self, data: bytes, now: float) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self.finished = True
            return
        try:
            chunk = _decode(payload)
        except msgspec.DecodeError as error:
            raise StreamError("bad_chunk", f"{error}: {_shorten(payload)}") from error
        if chunk.error is not None:
            raise StreamError("error_event", _shorten(payload))
        if chunk.usage is not None:
            self.usage = chunk.usage
        if chunk.choices:
            choice = chunk.choices[0]
            if choice.finish_reason is not None:
                self.finished = True
            if choice.has_token():
                self._token(now)

    def _token(self, now: float) -> None:
        if self.last is None:
            self.first = now
        else:
            self.gaps.append(now - self.last)
        self.last = now


class OpenAIClient:
    """Sends samples to one server. Use as an async context manager."""

    def __init__(self, target: TargetOptions, ignore_eos: bool) -> None:
        self._aiohttp = import_aiohttp()
        self._target = target
        self._ignore_eos = ignore_eos
        self._model = target.model
        path = "chat/completions" if target.endpoint == "chat" else "completions"
        self._url = target.url(path)

    async def __aenter__(self) -> Self:
        aiohttp = self._aiohttp
        key = self._target.api_key
        self._session: ClientSession = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._target.request_timeout),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._session.close()

    async def find_model(self) -> str:
        """The model to ask for: the given one, or the first that the server lists, once it is ready."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._target.ready_timeout
        while True:
            try:
                await self._check_health()
                served = await self._list_models()
                break
            except (self._aiohttp.ClientError, TimeoutError, StreamError) as error:
                if loop.time() >= give_up:
                    return self._model_in_spite_of(error)
            await asyncio.sleep(_READY_POLL_SECONDS)
        if self._model is None:
            if not served:
                raise BenchmarkError(f"{self._target.url('models')} lists no models; name one with --model")
            self._model = served[0]
        return self._model

    def _model_in_spite_of(self, error: Exception) -> str:
        """A server need not list its models if we know what to ask for, but it must not say that it is not ready."""
        if self._model is not None and not (isinstance(error, StreamError) and error.kind == "not_ready"):
            return self._model
        raise BenchmarkError(
            f"no answer from {self._target.url('models')}: {_cause(error)}; start the server, check --base-url and "
            f"--api-key, or wait for it with --ready-timeout SECONDS"
        ) from error

    async def _check_health(self) -> None:
        """Servers that load a model in the background answer 503 here; others know no such route."""
        async with self._session.get(f"{self._target.root}/health") as response:
            if response.status == 503:
                raise StreamError("not_ready", f"the server is not ready, {_shorten(await response.read())}")

    async def _list_models(self) -> list[str]:
        async with self._session.get(self._target.url("models")) as response:
            if response.status != 200:
                raise StreamError(f"http_{response.status}", f"HTTP {response.status}")
            body = await response.json(content_type=None)
        try:
            return [model["id"] for model in body["data"]]
        except (KeyError, TypeError) as error:
            raise StreamError("bad_body", f"an unexpected answer: {_shorten(str(body).encode())}") from error

    def payload(self, sample: Sample) -> bytes:
        """The body of the request. Made before the clock runs: it is no part of what is measured."""
        target = self._target
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": sample.output_len,
            "temperature": target.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._ignore_eos:
            body["ignore_eos"] = True
        return msgspec.json.encode({**body, **self._prompt(sample), **target.extra_body})

    def _prompt(self, sample: Sample) -> dict[str, Any]:
        if self._target.endpoint == "chat":
            if sample.token_ids is not None:
                raise ConfigError("the chat endpoint takes no token ids; use --endpoint completions, or text")
            return {"messages": sample.messages or [{"role": "user", "content": sample.text}]}
        if sample.messages is not None:
            raise ConfigError("the prompts are conversations; use --endpoint chat")
        return {"prompt": sample.text if sample.token_ids is None else sample.token_ids}

    async def send(self, payload: bytes, index: int, due: float | None, begin: float) -> RequestRecord:
        """Make one request; a failure becomes part of its record.

        `begin` is the start of the run on `clock`, `due` when the request should have been sent, counted from there.
        """
        stream = EventStream()
        start = clock() - begin
        record = RequestRecord(index=index, due=start if due is None else due, start=start)
        try:
            await self._read(payload, stream)
        except StreamError as error:
            record.error, record.message = error.kind, str(error)
        except TimeoutError as error:
            record.error, record.message = "timeout", _cause(error)
        except self._aiohttp.ClientConnectorError as error:
            record.error, record.message = "connect", _cause(error)
        except (self._aiohttp.ClientError, ConnectionError) as error:
            record.error, record.message = "disconnected", _cause(error)
        record.end = clock() - begin
        _fill(record, stream, begin)
        return record

    async def _read(self, payload: bytes, stream: EventStream) -> None:
        headers = {"Content-Type": "application/json"}
        async with self._session.post(self._url, data=payload, headers=headers) as response:
            if response.status != 200:
                raise StreamError(f"http_{response.status}", _shorten(await response.read()))
            async for data in response.content.iter_any():
                stream.feed(data, clock())
        if not stream.finished:
            raise StreamError("incomplete", "the stream ended without a finish_reason or [DONE]")


def import_aiohttp() -> Any:
    try:
        import aiohttp
    except ImportError as error:
        raise BenchmarkError(
            "measuring a server needs the package aiohttp; install it with: pip install 'quire[bench]'"
        ) from error
    return aiohttp


def _fill(record: RequestRecord, stream: EventStream, begin: float) -> None:
    """Token counts are the server's own where it sends them, else the chunks are counted."""
    if stream.first is not None and stream.last is not None:
        record.first_token, record.last_token = stream.first - begin, stream.last - begin
    record.gaps = stream.gaps
    usage = stream.usage
    if usage is None:
        record.counted_chunks = True
        record.output_tokens = stream.num_chunks
        return
    record.prompt_tokens, record.output_tokens = usage.prompt_tokens, usage.completion_tokens
    if usage.prompt_tokens_details is not None:
        record.cached_tokens = usage.prompt_tokens_details.cached_tokens


def _shorten(data: bytes) -> str:
    return " ".join(data[:_MESSAGE_LENGTH].decode("utf-8", "replace").split())


def _cause(error: BaseException) -> str:
    return str(error) or type(error).__name__
