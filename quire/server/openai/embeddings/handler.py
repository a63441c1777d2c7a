"""Embeddings: a checked request in, the vectors of its inputs out, whatever their number."""

from __future__ import annotations

import time
from typing import cast

from starlette.requests import Request
from starlette.responses import Response

from quire.server.context import ServerContext
from quire.server.errors import json_response
from quire.server.generation.field_table import check_extra_fields
from quire.server.middleware import request_id_of
from quire.server.openai.embeddings.protocol import Embedding, Embeddings, EmbeddingsRequest, EmbeddingsUsage
from quire.server.pooling.work import Output, as_base64, inputs_of, pool_all
from quire.types.sampling import PoolingParams

ROUTE = "/v1/embeddings"


async def create_embeddings(context: ServerContext, body: EmbeddingsRequest, request: Request) -> Response:
    model = context.check_model(body.model, "embed")
    check_extra_fields(body.model_extra or {}, context, ROUTE)
    params = PoolingParams(
        task="embed",
        dimensions=body.dimensions,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        use_activation=body.wants_activation,
    )
    outputs = await pool_all(
        context,
        request,
        inputs_of(body.input),
        params,
        model=model,
        priority=body.priority,
        prompt_name=body.prompt_name,
        instruction=body.instruction,
        names={"prompt": "input", "prompt_token_ids": "input"},
    )
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    answer = Embeddings(
        id=f"embd-{request_id_of(request.scope)}",
        created=int(time.time()),
        model=model,
        data=[Embedding(index, _encoded(output, body)) for index, output in enumerate(outputs)],
        usage=EmbeddingsUsage(num_tokens, num_tokens),
    )
    return json_response(answer)


def _encoded(output: Output, body: EmbeddingsRequest) -> list[float] | str:
    values = output.outputs.data
    return as_base64(values) if body.encoding_format == "base64" else cast("list[float]", values.tolist())
