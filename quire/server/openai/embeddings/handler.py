"""Embeddings: a checked request in, the vectors of its inputs out, whatever their number."""

from __future__ import annotations

import asyncio
import base64
import time
from typing import cast

from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.async_engine import AsyncEngine
from quire.server.context import ServerContext
from quire.server.errors import addressed, json_response
from quire.server.generation.field_table import check_extra_fields
from quire.server.generation.request import origin_of
from quire.server.middleware import request_id_of
from quire.server.openai.embeddings.protocol import Embedding, Embeddings, EmbeddingsRequest, EmbeddingsUsage
from quire.server.sse import while_connected
from quire.types.errors import RequestError
from quire.types.outputs import PoolingOutput, PoolingRequestOutput
from quire.types.sampling import PoolingParams

ROUTE = "/v1/embeddings"

Input = str | list[int]
Output = PoolingRequestOutput[PoolingOutput]


async def create_embeddings(context: ServerContext, body: EmbeddingsRequest, request: Request) -> Response:
    model = context.check_model(body.model, "embed")
    check_extra_fields(body.model_extra or {}, context, ROUTE)
    inputs = inputs_of(body)
    outputs = await while_connected(request.receive, embed_all(context, body, inputs, request))
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    answer = Embeddings(
        id=f"embd-{request_id_of(request.scope)}",
        created=int(time.time()),
        model=model,
        data=[Embedding(index, _encoded(output, body)) for index, output in enumerate(outputs)],
        usage=EmbeddingsUsage(num_tokens, num_tokens),
    )
    return json_response(answer)


def inputs_of(body: EmbeddingsRequest) -> list[Input]:
    """The inputs as a list: a text or a list of integers is one input."""
    given = body.input
    if isinstance(given, str):
        return [given]
    if not given:
        raise RequestError("input is an empty list; give a text or token ids", "input")
    if isinstance(given[0], int):
        return [given]
    return cast("list[Input]", given)


async def embed_all(
    context: ServerContext, body: EmbeddingsRequest, inputs: list[Input], request: Request
) -> list[Output]:
    """The outputs of all inputs, in their order. As many are with the engine at a time as it runs at once."""
    engine, origin = context.provider.engine, origin_of(request)
    params = PoolingParams(
        dimensions=body.dimensions,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        use_activation=body.use_activation,
    )
    outputs: list[Output | None] = [None] * len(inputs)
    left = iter(range(len(inputs)))

    async def work(engine: AsyncEngine) -> None:
        for index in left:
            outputs[index] = await engine.encode(
                inputs[index],
                params,
                prompt_name=body.prompt_name,
                priority=body.priority or 0,
                trace_headers=origin.trace_headers,
                arrival_time=origin.arrival_time,
            )

    num_workers = min(len(inputs), engine.info.max_num_seqs)
    names = {"prompt": "input", "prompt_token_ids": "input"}
    with context.admission.enter(num_workers, engine.info.max_num_seqs, "input"), addressed(names):
        tasks = [asyncio.create_task(work(engine)) for _ in range(num_workers)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return [output for output in outputs if output is not None]


def _encoded(output: Output, body: EmbeddingsRequest) -> list[float] | str:
    values = output.outputs.data
    if body.encoding_format == "base64":
        return base64.b64encode(values.astype("<f4", copy=False).tobytes()).decode()
    return cast("list[float]", values.tolist())
