"""Runs a request for embeddings: all its inputs through the engine, as many at a time as it runs at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from quire.frontend.async_engine import AsyncEngine
from quire.server.context import ServerContext
from quire.server.errors import addressed
from quire.server.generation.request import Origin
from quire.types.outputs import PoolingOutput, PoolingRequestOutput
from quire.types.sampling import PoolingParams

EmbeddingInput = str | list[int]
EmbeddingOutput = PoolingRequestOutput[PoolingOutput]


async def embed_all(
    context: ServerContext,
    inputs: Sequence[EmbeddingInput],
    params: PoolingParams,
    origin: Origin,
    *,
    field: str,
    prompt_name: str | None = None,
    priority: int = 0,
) -> list[EmbeddingOutput]:
    """The outputs of all inputs, in their order. `field` is what the request calls its inputs."""
    engine = context.provider.engine
    outputs: list[EmbeddingOutput | None] = [None] * len(inputs)
    left = iter(range(len(inputs)))

    async def work(engine: AsyncEngine) -> None:
        for index in left:
            outputs[index] = await engine.encode(
                inputs[index],
                params,
                prompt_name=prompt_name,
                priority=priority,
                trace_headers=origin.trace_headers,
                arrival_time=origin.arrival_time,
            )

    num_workers = min(len(inputs), engine.info.max_num_seqs)
    names: dict[str, str | None] = {"prompt": field, "prompt_token_ids": field}
    with context.admission.enter(num_workers, engine.info.max_num_seqs, field), addressed(names):
        tasks = [asyncio.create_task(work(engine)) for _ in range(num_workers)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return [output for output in outputs if output is not None]
