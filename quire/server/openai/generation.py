"""What the generating endpoints share: ids, admission, and the outputs of several prompts as one stream."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NoReturn

from starlette.requests import Request

from quire.frontend.async_engine import AsyncEngine
from quire.frontend.reading import Reading
from quire.server.context import ServerContext
from quire.server.conversation.grammar import renamed
from quire.server.middleware import is_request_id, request_id_of
from quire.server.openai.sampling import GenerationFields
from quire.types.errors import EngineDeadError, RequestError
from quire.types.outputs import RequestOutput
from quire.types.sampling import SamplingParams
from quire.utils.log import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One checked request: what to run and under which name to answer."""

    response_id: str
    engine_id: str
    model: str
    prompts: Sequence[dict[str, Any]]
    prompt_field: str
    """What the request calls its prompt."""
    format_field: str | None = None
    """What the request calls the grammar of its answer."""
    params: SamplingParams
    reading: Reading | None = None
    """How the answer is read, where it is more than text."""
    is_streamed: bool = False
    """Whether a client hears of each output, and can be kept waiting for the first."""
    priority: int
    add_special_tokens: bool
    trace_headers: dict[str, str] | None
    arrival_time: float = field(default_factory=time.monotonic)
    """When the HTTP request came, on the monotonic clock."""
    created: int = field(default_factory=lambda: int(time.time()))


def request_name(body: GenerationFields, request: Request) -> tuple[str, bool]:
    """What the answer's id is made of, and whether the server chose it: it is then the only one of its name."""
    if body.request_id is None:
        return request_id_of(request.scope), bool(request.state.own_request_id)
    if not is_request_id(body.request_id):
        raise RequestError("request_id must be 1 to 128 letters, digits or any of . : / @ + = _ -", "request_id")
    return body.request_id, False


def response_ids(prefix: str, body: GenerationFields, request: Request) -> tuple[str, str]:
    """The answer's id and the engine's. Clients may use an id twice at a time; the engine may not."""
    name, own = request_name(body, request)
    response_id = f"{prefix}{name}"
    return response_id, response_id if own else unique_id(response_id)


def unique_id(response_id: str) -> str:
    return f"{response_id}-{secrets.token_hex(4)}"


async def run(context: ServerContext, generation: Generation) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(index of the prompt, output) as they come. Closing it aborts everything that has not finished.

    The first output comes when the engine has all prompts, and has no completions. A stream whose engine dies between
    that and its first token asks the next engine, once.
    """
    engine = context.provider.engine
    prompts, params = generation.prompts, generation.params
    if context.settings.log_requests:
        for prompt in prompts:
            logger.info("%s: %r with %s", generation.engine_id, prompt, params)
    with context.admission.enter(
        params.n * len(prompts), engine.info.max_num_seqs, "n" if len(prompts) == 1 else generation.prompt_field
    ):
        is_first, may_ask_again = True, False
        try:
            while True:
                try:
                    async with aclosing(merged(_streams(engine, generation))) as outputs:
                        announcement = await anext(outputs)
                        if is_first:
                            yield announcement
                        may_ask_again = is_first and generation.is_streamed
                        async for item in outputs:
                            may_ask_again = False
                            yield item
                    return
                except EngineDeadError as error:
                    if not may_ask_again:
                        raise
                    logger.warning(
                        "%s has no token yet and will ask the next engine: %s", generation.engine_id, error
                    )
                is_first = may_ask_again = False
                engine = await context.provider.wait_engine()
        except RequestError as error:
            raise_named(error, generation)


def _streams(engine: AsyncEngine, generation: Generation) -> list[AsyncGenerator[RequestOutput, None]]:
    """One for each prompt; they ask the engine when they are read."""
    prompts = generation.prompts
    return [
        engine.generate(
            prompt,
            generation.params,
            generation.engine_id if len(prompts) == 1 else f"{generation.engine_id}-{index}",
            priority=generation.priority,
            add_special_tokens=generation.add_special_tokens,
            trace_headers=generation.trace_headers,
            arrival_time=generation.arrival_time,
            reading=generation.reading,
            announce=True,
        )
        for index, prompt in enumerate(prompts)
    ]


def raise_named(error: RequestError, generation: Generation) -> NoReturn:
    """Raise the error in the words of the request: what the engine calls a prompt has other names in the APIs."""
    field = error.field or ""
    if generation.format_field is not None and field.startswith("structured_outputs"):
        raise renamed(error, generation.format_field) from error
    if field in ("prompt", "prompt_token_ids"):
        error.field = generation.prompt_field
    raise error


async def merged(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The outputs of all streams as they come. A stream is read on only when its last output was taken.

    Each stream begins with an announcement; of these only one is handed on, when all have come.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as outputs:
            async for output in outputs:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput] | Exception] = asyncio.Queue(maxsize=1)

    async def pump(index: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async for output in stream:
                await queue.put((index, output))
        except Exception as error:  # whatever ended one stream must reach the reader of all of them
            await queue.put(error)

    tasks: list[asyncio.Task[None]] = []
    try:
        for stream in streams:
            announcement = await anext(stream)
            await asyncio.sleep(0)  # a prompt was tokenized: let others go before the next
        yield 0, announcement
        tasks += [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
        left = len(streams)
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            left -= item[1].finished
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def finished_outputs(context: ServerContext, generation: Generation) -> list[RequestOutput]:
    """One finished output per prompt, in the order of the prompts."""
    outputs: list[RequestOutput | None] = [None] * len(generation.prompts)
    async with aclosing(run(context, generation)) as stream:
        async for index, output in stream:
            outputs[index] = output
    return [output for output in outputs if output is not None]
