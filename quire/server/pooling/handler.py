"""Pooling, classes, scores and ranks: checked requests in, what the model makes of their texts out."""

from __future__ import annotations

import time
from typing import cast

from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.scoring import plan_scores, ranked
from quire.frontend.sparse import by_token
from quire.server.context import ServerContext
from quire.server.errors import addressed, json_response
from quire.server.generation.field_table import check_extra_fields
from quire.server.middleware import request_id_of
from quire.server.pooling.protocol import (
    Classified,
    ClassifyAnswer,
    ClassifyRequest,
    PooledData,
    PoolingAnswer,
    PoolingRequest,
    Ranked,
    RankedDocument,
    RerankAnswer,
    RerankMeta,
    RerankRequest,
    ScoreAnswer,
    Scored,
    ScoreRequest,
)
from quire.server.pooling.work import Output, PoolingFields, PoolingUsage, as_base64, inputs_of, pool_all
from quire.types.errors import RequestError
from quire.types.sampling import PoolingParams, PoolingTask

_INPUT = {"prompt": "input", "prompt_token_ids": "input"}


def _params(
    body: PoolingFields, task: PoolingTask | None, dimensions: int | None = None, step_tag_id: int | None = None
) -> PoolingParams:
    return PoolingParams(
        task=task,
        dimensions=dimensions,
        step_tag_id=step_tag_id,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        use_activation=body.wants_activation,
    )


async def pool(context: ServerContext, body: PoolingRequest, request: Request) -> Response:
    model = context.check_model(body.model, body.task)
    check_extra_fields(body.model_extra or {}, context, "/pooling")
    params = _params(body, task=body.task, dimensions=body.dimensions, step_tag_id=body.step_tag_id)
    outputs = await pool_all(
        context,
        request,
        inputs_of(body.input),
        params,
        model=model,
        priority=body.priority,
        prompt_name=body.prompt_name,
        instruction=body.instruction,
        names=_INPUT,
    )
    pooler = context.provider.engine.info.pooler
    is_sparse = pooler is not None and (body.task or pooler.tasks[0]) == "sparse"

    left_out = context.tokenizer().unweighted if is_sparse and pooler is not None and pooler.kind != "max" else ()

    def told(output: Output) -> list[float | list[float]] | dict[str, float] | str:
        values = output.outputs.data
        if is_sparse and body.encoding_format != "base64":
            return by_token(values, output.prompt_token_ids, left_out)
        if body.encoding_format == "base64":
            return as_base64(values)
        return cast("list[float | list[float]]", values.tolist())

    answer = PoolingAnswer(
        id=f"pool-{request_id_of(request.scope)}",
        created=int(time.time()),
        model=model,
        data=[PooledData(index, told(output)) for index, output in enumerate(outputs)],
        usage=PoolingUsage.of(outputs),
    )
    return json_response(answer)


async def classify(context: ServerContext, body: ClassifyRequest, request: Request) -> Response:
    model = context.check_model(body.model, "classify")
    check_extra_fields(body.model_extra or {}, context, "/classify")
    params = _params(body, task="classify")
    inputs = inputs_of(body.input)
    outputs = await pool_all(context, request, inputs, params, model=model, priority=body.priority, names=_INPUT)
    pooler = context.provider.engine.info.pooler
    assert pooler is not None
    answer = ClassifyAnswer(
        id=f"classify-{request_id_of(request.scope)}",
        created=int(time.time()),
        model=model,
        data=[_classified(index, output, pooler.labels) for index, output in enumerate(outputs)],
        usage=PoolingUsage.of(outputs),
    )
    return json_response(answer)


def _classified(index: int, output: Output, labels: tuple[str, ...]) -> Classified:
    probs = cast("list[float]", output.outputs.data.tolist())
    return Classified(index, labels[probs.index(max(probs))], probs, len(probs))


async def score(context: ServerContext, body: ScoreRequest, request: Request) -> Response:
    model = context.check_model(body.model, "score")
    check_extra_fields(body.model_extra or {}, context, "/score")
    first, second = ([text] if isinstance(text, str) else text for text in (body.text_1, body.text_2))
    scores, outputs = await _scores(context, body, model, request, first, second, body.instruction)
    answer = ScoreAnswer(
        id=f"score-{request_id_of(request.scope)}",
        created=int(time.time()),
        model=model,
        data=[Scored(index, value) for index, value in enumerate(scores)],
        usage=PoolingUsage.of(outputs),
    )
    return json_response(answer)


async def rerank(context: ServerContext, body: RerankRequest, request: Request, *, with_texts: bool) -> Response:
    """`with_texts`: whether documents are in the answer if the request does not say."""
    model = context.check_model(body.model, "score")
    check_extra_fields(body.model_extra or {}, context, "/rerank")
    if body.top_n is not None and body.top_n < 1:
        raise RequestError(f"top_n is {body.top_n} but must be at least 1", "top_n")
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    if not texts:
        raise RequestError("documents is an empty list; give at least one", "documents")
    kept = await _first_tokens(context, texts, body.max_tokens_per_doc)
    scores, outputs = await _scores(context, body, model, request, [body.query], kept, body.instruction)
    shows = with_texts if body.return_documents is None else body.return_documents
    answer = RerankAnswer(
        id=f"rerank-{request_id_of(request.scope)}",
        model=model,
        results=[
            Ranked(index, scores[index], RankedDocument(texts[index]) if shows else None)
            for index in ranked(scores, body.top_n)
        ],
        usage=PoolingUsage.of(outputs),
        meta=RerankMeta({"version": "2"}, {"search_units": 1}),
    )
    return json_response(answer)


async def _scores(
    context: ServerContext,
    body: PoolingFields,
    model: str,
    request: Request,
    first: list[str],
    second: list[str],
    instruction: str | None,
) -> tuple[list[float], list[Output]]:
    ranks = isinstance(body, RerankRequest)
    one, other = ("query", "documents") if ranks else ("text_1", "text_2")
    names = {"prompt": other, "documents": other, "queries": one}
    with addressed(names):
        plan = plan_scores(context.provider.engine.info.pooler, first, second, instruction)
    params = _params(body, task=plan.task)
    outputs = await pool_all(context, request, plan.prompts, params, model=model, priority=body.priority, names=names)
    return plan.scores([output.outputs.data for output in outputs]), outputs


async def _first_tokens(context: ServerContext, texts: list[str], count: int | None) -> list[str]:
    """The first tokens of each text, this many at most."""
    if count is None:
        return texts
    if count < 1:
        raise RequestError(f"max_tokens_per_doc is {count} but must be at least 1", "max_tokens_per_doc")
    tokenizer = context.tokenizer()
    return [tokenizer.decode((await context.encode(text, False, "documents"))[:count]) for text in texts]
