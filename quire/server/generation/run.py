"""Runs a request for text: admission, the engine, the outputs of all prompts as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from quire.frontend.async_beam_search import beam_search
from quire.frontend.async_engine import AsyncEngine
from quire.server.context import ServerContext
from quire.server.errors import addressed
from quire.server.generation.request import Generation
from quire.types.outputs import RequestOutput
from quire.types.request import AdapterRef
from quire.utils.log import get_logger

logger = get_logger(__name__)


async def run(context: ServerContext, generation: Generation) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield (index of the prompt, output). Closing the generator aborts what has not finished.

    The first output has no completions: it comes when the engine has all prompts.
    """
    engine = context.provider.engine
    prompts, params = generation.prompts, generation.params
    if context.settings.log_requests:
        for prompt in prompts:
            logger.info("%s: %r with %s", generation.ids.engine, prompt, params)
    field = "n" if len(prompts) == 1 else generation.prompt_field
    width = params.n if generation.beam_search is None else generation.beam_search.beam_width
    with (
        context.admission.enter(width * len(prompts), engine.info.max_num_seqs, field),
        addressed(request_fields(generation)),
    ):
        adapter = context.adapters.get(generation.model)
        async with aclosing(merged(_streams(engine, generation, adapter))) as outputs:
            async for item in outputs:
                yield item


def _streams(
    engine: AsyncEngine, generation: Generation, adapter: AdapterRef | None
) -> list[AsyncGenerator[RequestOutput, None]]:
    """One stream for each prompt; a request is sent when its stream is first read."""
    beam, tenant = generation.beam_search, generation.origin.tenant
    prompts = generation.prompts if tenant is None else [{**p, "tenant": tenant} for p in generation.prompts]
    if beam is not None:
        return [
            beam_search(
                engine,
                prompt,
                generation.params,
                beam,
                f"{generation.ids.engine}-{index}",
                priority=generation.priority,
                add_special_tokens=generation.add_special_tokens,
                reading=generation.reading,
                adapter=adapter,
            )
            for index, prompt in enumerate(prompts)
        ]
    return [
        engine.generate(
            prompt,
            generation.params,
            generation.ids.engine if len(prompts) == 1 else f"{generation.ids.engine}-{index}",
            priority=generation.priority,
            add_special_tokens=generation.add_special_tokens,
            trace_headers=generation.origin.trace_headers,
            arrival_time=generation.origin.arrival_time,
            reading=generation.reading,
            announce=True,
            adapter=adapter,
            given_token_ids=generation.given_token_ids,
        )
        for index, prompt in enumerate(prompts)
    ]


def request_fields(generation: Generation) -> dict[str, str | None]:
    """The request's own names for the fields in errors of the engine."""
    prompt = generation.prompt_field
    return {"structured_outputs": generation.format_field, "prompt": prompt, "prompt_token_ids": prompt}


async def merged(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield the outputs of all streams as they come. The next output of a stream is read when the last was taken.

    Each stream begins with an announcement; one of them is yielded, when all have come.
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
        except Exception as error:  # any failure of one stream must reach the reader of all of them
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
