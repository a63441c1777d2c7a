"""Runs a request for text: admission, the engine, the outputs of all prompts as one stream.

What is on the request's record is said again, and the engine goes on after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

import msgspec

from quire.frontend.async_beam_search import beam_search
from quire.frontend.async_engine import AsyncEngine
from quire.frontend.mailbox import merge_deltas
from quire.server.context import ServerContext
from quire.server.errors import addressed
from quire.server.generation.record import with_call_ids
from quire.server.generation.request import Generation
from quire.types.outputs import RequestOutput
from quire.types.request import AdapterRef
from quire.utils.log import get_logger

logger = get_logger(__name__)


async def run(context: ServerContext, generation: Generation) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield (index of the prompt, output). Closing the generator aborts what has not finished.

    The first output has no completions: it comes when the engine has all prompts. Outputs that are recorded are
    deltas, whatever the parameters say.
    """
    engine, record = context.provider.engine, generation.record
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
        known = await _said_before(engine, generation)
        if known:
            num_tokens = sum(len(said.token_ids) for _, output in known for said in output.outputs)
            logger.info("%s goes on after %d tokens", generation.ids.engine, num_tokens)
        streams = _streams(engine, generation, adapter, known)
        async with aclosing(merged(streams)) as outputs:
            # All that was asked for may have been said already.
            yield await anext(outputs) if streams else (0, msgspec.structs.replace(known[0][1], outputs=[]))
            for item in known:
                yield item
            async for index, output in outputs:
                if record.is_kept:
                    reading = generation.reading
                    output = with_call_ids(output, None if reading is None else reading.tool_format)
                    record.add_output(generation.turn, index, output)
                yield index, output


async def _said_before(engine: AsyncEngine, generation: Generation) -> list[tuple[int, RequestOutput]]:
    """The recorded outputs, with the indexes of their prompts."""
    said = generation.record.said(generation.turn)
    prepared = {
        index: await engine.prepare(
            generation.prompts[index], generation.params, add_special_tokens=generation.add_special_tokens
        )
        for index in {line.prompt for line in said}
    }
    return [
        (line.prompt, line.output(generation.engine_id(line.prompt), request.prompt, request.prompt_token_ids))
        for line in said
        for request in [prepared[line.prompt]]
    ]


def _streams(
    engine: AsyncEngine,
    generation: Generation,
    adapter: AdapterRef | None,
    known: list[tuple[int, RequestOutput]],
) -> dict[int, AsyncGenerator[RequestOutput, None]]:
    """A stream for each prompt of which not all was said; a request is sent when its stream is first read."""
    beam, tenant, params = generation.beam_search, generation.origin.tenant, generation.params
    if generation.record.is_kept:
        params = msgspec.structs.replace(params, output_kind="delta")
    done = {index for index, output in known if output.finished}
    prompts = {
        index: prompt if tenant is None else {**prompt, "tenant": tenant}
        for index, prompt in enumerate(generation.prompts)
        if index not in done
    }
    if beam is not None:
        return {
            index: beam_search(
                engine,
                prompt,
                params,
                beam,
                f"{generation.ids.engine}-{index}",
                priority=generation.priority,
                add_special_tokens=generation.add_special_tokens,
                reading=generation.reading,
                adapter=adapter,
            )
            for index, prompt in prompts.items()
        }
    said = {index: [output for place, output in known if place == index] for index in prompts}
    return {
        index: engine.generate(
            prompt,
            params,
            generation.engine_id(index),
            priority=generation.priority,
            add_special_tokens=generation.add_special_tokens,
            trace_headers=generation.origin.trace_headers,
            arrival_time=generation.origin.arrival_time,
            reading=generation.reading,
            announce=True,
            adapter=adapter,
            given=merge_deltas(said[index]) if said[index] else None,
        )
        for index, prompt in prompts.items()
    }


def request_fields(generation: Generation) -> dict[str, str | None]:
    """The request's own names for the fields in errors of the engine."""
    prompt = generation.prompt_field
    return {"structured_outputs": generation.format_field, "prompt": prompt, "prompt_token_ids": prompt}


async def merged(
    streams: Mapping[int, AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield the outputs of all streams as they come. The next output of a stream is read when the last was taken.

    Each stream begins with an announcement; one of them is yielded, when all have come.
    """
    if len(streams) <= 1:
        for index, stream in streams.items():
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    yield index, output
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
        for stream in streams.values():
            announcement = await anext(stream)
            await asyncio.sleep(0)  # a prompt was tokenized: let others go before the next
        yield 0, announcement
        tasks += [asyncio.create_task(pump(index, stream)) for index, stream in streams.items()]
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
        for stream in streams.values():
            await stream.aclose()


async def finished_outputs(context: ServerContext, generation: Generation) -> list[RequestOutput]:
    """One finished output per prompt, in the order of the prompts."""
    said: list[list[RequestOutput]] = [[] for _ in generation.prompts]
    async with aclosing(run(context, generation)) as stream:
        await anext(stream)
        async for index, output in stream:
            said[index].append(output)
    return [merge_deltas(outputs) for outputs in said]
