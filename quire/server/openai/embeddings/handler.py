"""Embeddings: a checked request in, the vectors of its inputs out, whatever their number."""

from __future__ import annotations

import base64
import time
from typing import cast

from starlette.requests import Request
from starlette.responses import Response

from quire.server.context import ServerContext
from quire.server.errors import json_response
from quire.server.generation.embed import EmbeddingInput, EmbeddingOutput, embed_all
from quire.server.generation.field_table import check_extra_fields
from quire.server.generation.request import origin_of
from quire.server.middleware import request_id_of
from quire.server.openai.embeddings.protocol import Embedding, Embeddings, EmbeddingsRequest, EmbeddingsUsage
from quire.server.sse import while_connected
from quire.types.errors import RequestError
from quire.types.sampling import PoolingParams

ROUTE = "/v1/embeddings"


async def create_embeddings(context: ServerContext, body: EmbeddingsRequest, request: Request) -> Response:
    model = context.check_model(body.model, "embed")
    check_extra_fields(body.model_extra or {}, context, ROUTE)
    inputs = inputs_of(body)
    params = PoolingParams(
        dimensions=body.dimensions,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        use_activation=body.use_activation,
    )
    work = embed_all(
        context,
        inputs,
        params,
        origin_of(request),
        field="input",
        prompt_name=body.prompt_name,
        priority=body.priority or 0,
    )
    outputs = await while_connected(request.receive, work)
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    answer = Embeddings(
        id=f"embd-{request_id_of(request.scope)}",
        created=int(time.time()),
        model=model,
        data=[Embedding(index, _encoded(output, body)) for index, output in enumerate(outputs)],
        usage=EmbeddingsUsage(num_tokens, num_tokens),
    )
    return json_response(answer)


def inputs_of(body: EmbeddingsRequest) -> list[EmbeddingInput]:
    """The inputs as a list: a text or a list of integers is one input."""
    given = body.input
    if isinstance(given, str):
        return [given]
    if not given:
        raise RequestError("input is an empty list; give a text or token ids", "input")
    if isinstance(given[0], int):
        return [given]
    return cast("list[EmbeddingInput]", given)


def _encoded(output: EmbeddingOutput, body: EmbeddingsRequest) -> list[float] | str:
    values = output.outputs.data
    if body.encoding_format == "base64":
        return base64.b64encode(values.astype("<f4", copy=False).tobytes()).decode()
    return cast("list[float]", values.tolist())
