"""Chat, generate and embeddings of Ollama's API: a checked request in, an answer or a stream of lines out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.context import ServerContext
from quire.server.conversation.answer import AnswerReader, ChoiceReader
from quire.server.conversation.prepare import prepare_conversation
from quire.server.conversation.request import Conversation
from quire.server.errors import failure_of, json_response, ollama_error
from quire.server.generation.field_table import check_extra_fields
from quire.server.generation.fields import GenerationFields, engine_prompt
from quire.server.generation.request import Generation, conversation_generation, ids_of, origin_of
from quire.server.generation.run import finished_outputs, run
from quire.server.ollama.answer import RunAnswer, nanoseconds
from quire.server.ollama.convert import (
    chat_conversation,
    check_options,
    generation_fields,
    keep_alive_seconds,
    max_tokens,
    options_named,
    output_format,
    prompt_conversation,
    refuse_images,
)
from quire.server.ollama.protocol import (
    ChatRequest,
    Embedding,
    Embeddings,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    Line,
    RunFields,
)
from quire.server.pooling.work import pool_all
from quire.server.sse import ACCEPTED, EventStream, while_connected
from quire.types.errors import QuireError, RequestError
from quire.types.sampling import PoolingParams, SamplingParams

NDJSON = "application/x-ndjson"
# Fields that say how Ollama makes room in a context, or that ask for images of another size.
HINTS = frozenset({"height", "shift", "steps", "truncate", "width"})


async def chat(context: ServerContext, body: ChatRequest, request: Request) -> Response:
    model = check(context, body, "/api/chat")
    answer = _answer(context, body.model or model, body, is_chat=True)
    if not body.messages:
        return json_response(answer.loaded(is_unloaded=keep_alive(context, body.keep_alive, from_now=True) == 0))
    conversation = chat_conversation(context, body, model)
    return await _converse(context, body, request, model, conversation, answer, "messages")


async def generate(context: ServerContext, body: GenerateRequest, request: Request) -> Response:
    model = check(context, body, "/api/generate")
    refuse_images(body.images, "images")
    if body.template:
        raise RequestError("template is not taken: the model's own chat template is used; leave it out", "template")
    plain = bool(body.raw or body.suffix)
    answer = _answer(context, body.model or model, body, is_chat=False, shows_context=not plain)
    if not body.prompt and not body.suffix:
        return json_response(answer.loaded(is_unloaded=keep_alive(context, body.keep_alive, from_now=True) == 0))
    before = _earlier_text(context, body)
    if not plain:
        conversation = prompt_conversation(context, body, model)
        return await _converse(context, body, request, model, conversation, answer, "prompt", before)
    fields = generation_fields(body.options, body, model)
    wanted = output_format(body)
    params = _params(context, body, fields)
    if wanted is not None:
        params = msgspec.structs.replace(params, structured_outputs=wanted.constraint)
    prompt = engine_prompt(fields, before + (body.prompt or ""))
    generation = Generation(
        ids=ids_of("gen-", fields, request),
        model=model,
        prompts=[{**prompt, "suffix": body.suffix} if body.suffix else prompt],
        prompt_field="prompt",
        format_field=None if wanted is None else wanted.where,
        params=params,
        priority=0,
        add_special_tokens=not before,
        origin=origin_of(request),
    )
    reader = AnswerReader(lambda: ChoiceReader(lambda name, index: name))
    return await _run(context, generation, reader, answer, request, streams=body.stream is not False)


def keep_alive(context: ServerContext, value: int | float | str | None, *, from_now: bool = False) -> float | None:
    """Keep the engine awake for as long as a request says; returns the seconds, None if it stays awake."""
    if value is None or value == "":
        return None
    seconds = keep_alive_seconds(value)
    if context.keep_alive is None:
        return None
    context.keep_alive.want(seconds, from_now=from_now)
    return seconds


def check(context: ServerContext, body: RunFields, route: str) -> str:
    """The model or adapter that is wanted. Refuses what must not be ignored."""
    model = context.check_model(body.model, "generate")
    keep_alive(context, body.keep_alive)
    check_extra_fields(body.model_extra or {}, context, route, HINTS)
    check_options(context, body.options, route)
    longest, wanted = context.max_model_len(), None if body.options is None else body.options.num_ctx
    if longest is not None and wanted is not None and wanted > longest:
        context.note_ignored_field(route, f"options.num_ctx above {longest}, the server's --max-model-len")
    return model


async def embed(context: ServerContext, body: EmbedRequest, request: Request) -> Embeddings:
    begin = time.monotonic()
    inputs = [body.input] if isinstance(body.input, str) else body.input
    params = PoolingParams(
        dimensions=body.dimensions,
        truncate_prompt_tokens=None if body.truncate is False else -1,
        use_activation=True,  # Ollama's vectors have length 1
    )
    model = _check_embed(context, body, "/api/embed")
    given = [text for text in inputs if text]
    vectors, num_tokens = await _embed(context, model, given, params, request, "input")
    return Embeddings(body.model or model, vectors, nanoseconds(time.monotonic() - begin), 1, num_tokens)


async def embed_one(context: ServerContext, body: EmbeddingsRequest, request: Request) -> Embedding:
    """The vector of one text, as long as the model makes it."""
    params = PoolingParams(truncate_prompt_tokens=-1)
    inputs = [body.prompt] if body.prompt else []
    model = _check_embed(context, body, "/api/embeddings")
    vectors, _ = await _embed(context, model, inputs, params, request, "prompt")
    return Embedding(vectors[0] if vectors else [])


def _check_embed(context: ServerContext, body: EmbedRequest | EmbeddingsRequest, route: str) -> str:
    model = context.check_model(body.model, "embed")
    keep_alive(context, body.keep_alive)
    check_extra_fields(body.model_extra or {}, context, route, HINTS)
    check_options(context, body.options, route)
    return model


async def _embed(
    context: ServerContext,
    model: str,
    inputs: Sequence[str],
    params: PoolingParams,
    request: Request,
    field: str,
) -> tuple[list[list[float]], int]:
    if not inputs:
        return [], 0
    outputs = await pool_all(
        context,
        request,
        inputs,
        params,
        model=model,
        priority=None,
        names={"prompt": field, "prompt_token_ids": field},
    )
    vectors = [cast("list[float]", output.outputs.data.tolist()) for output in outputs]
    return vectors, sum(len(output.prompt_token_ids) for output in outputs)


async def _converse(
    context: ServerContext,
    body: RunFields,
    request: Request,
    model: str,
    conversation: Conversation,
    answer: RunAnswer,
    prompt_field: str,
    before: str = "",
) -> Response:
    """Answer a conversation; `before` is the text of an earlier one that it goes on from."""
    fields = generation_fields(body.options, body, model)
    ids = ids_of("chat-", fields, request)
    work = prepare_conversation(context, conversation, _params(context, body, fields))
    prepared = await while_connected(request.receive, work)
    if before:
        prepared = dataclasses.replace(prepared, prompt=before + prepared.prompt)
    generation = conversation_generation(
        fields, prepared, ids, origin_of(request), model=model, prompt_field=prompt_field
    )
    reader = prepared.reader()
    return await _run(context, generation, reader, answer, request, streams=body.stream is not False)


async def _run(
    context: ServerContext,
    generation: Generation,
    reader: AnswerReader,
    answer: RunAnswer,
    request: Request,
    *,
    streams: bool,
) -> Response:
    if not streams:
        (output,) = await while_connected(request.receive, finished_outputs(context, generation))
        return json_response(answer.whole(output, reader.read(output)[0]))

    async def lines() -> AsyncGenerator[bytes, None]:
        async with aclosing(run(context, generation)) as outputs:
            await anext(outputs)
            yield ACCEPTED
            async for _, output in outputs:
                data = b"".join(
                    encoded(line) for piece in reader.read(output) for line in answer.lines(output, piece)
                )
                if data:
                    yield data

    def failed(error: QuireError) -> bytes:
        return ollama_error(failure_of(error)) + b"\n"

    def silence() -> bytes:
        return encoded(answer.empty())

    return EventStream(lines(), opening=silence, keep_alive=silence, failed=failed, end=b"", media_type=NDJSON)


def encoded(line: Line) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def _answer(
    context: ServerContext, model: str, body: RunFields, *, is_chat: bool, shows_context: bool = False
) -> RunAnswer:
    num_top = body.top_logprobs or 0
    return RunAnswer(model, context.text.tokenizer, is_chat=is_chat, num_top=num_top, shows_context=shows_context)


def _params(context: ServerContext, body: RunFields, fields: GenerationFields) -> SamplingParams:
    given: dict[str, Any] = fields.sampling_fields()
    limit = max_tokens(body.options)
    if limit is not None:
        given["max_tokens"] = min(limit, context.provider.engine.info.max_model_len)
    if body.logprobs:
        num_top, most = body.top_logprobs or 0, context.settings.max_logprobs
        if num_top < 0 or 0 <= most < num_top:
            raise RequestError(f"top_logprobs is {num_top} but must be between 0 and {most}", "top_logprobs")
        given["logprobs"] = num_top
    given["output_kind"] = "delta" if fields.stream else "final_only"
    with options_named():
        return msgspec.structs.replace(context.text.chat_params(), **given)


def _earlier_text(context: ServerContext, body: GenerateRequest) -> str:
    """What the `context` of an earlier answer says."""
    if not body.context:
        return ""
    tokenizer = context.tokenizer()
    wrong = next((token for token in body.context if token >= tokenizer.vocab_size), None)
    if wrong is not None:
        raise RequestError(f"context holds {wrong}, which is no token of this model; leave context out", "context")
    return tokenizer.decode(body.context, skip_special_tokens=False)
