"""Chat completions: a checked request in, a body or a stream of chunks out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.server.context import ServerContext
from quire.server.errors import json_response
from quire.server.middleware import trace_headers_of
from quire.server.openai.chat.messages import last_text, render
from quire.server.openai.chat.protocol import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChunkChoice,
    Delta,
    ResponseMessage,
)
from quire.server.openai.fields import check_extra_fields
from quire.server.openai.generation import Generation, finished_outputs, response_ids, run
from quire.server.openai.logprobs import ChatLogprobs, LogprobsFormatter, prompt_logprobs
from quire.server.openai.sampling import check_logprobs, check_stream_options, engine_prompt, sampling_params
from quire.server.openai.usage import Usage, UsageCounter
from quire.server.sse import EventStream, event, while_connected
from quire.types.errors import RequestError
from quire.types.outputs import CompletionOutput, RequestOutput

ROUTE = "/v1/chat/completions"


async def create_chat_completion(context: ServerContext, body: ChatCompletionRequest, request: Request) -> Response:
    generation = await prepare(context, body, request)
    answer = ChatAnswer(context, body, generation)
    if body.stream:
        return EventStream(answer.events())
    return json_response(await while_connected(request.receive, answer.body()))


async def prepare(context: ServerContext, body: ChatCompletionRequest, request: Request) -> Generation:
    """Check everything that does not need the engine's word."""
    model = context.check_model(body.model)
    check_extra_fields(body.model_extra or {}, context, ROUTE)
    check_stream_options(body)
    response_id, engine_id = response_ids("chatcmpl", body, request)
    engine = context.provider.engine
    params = sampling_params(
        body,
        context.text.chat_params(),
        context.settings,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        max_model_len=engine.info.max_model_len,
        logprobs=_num_logprobs(body, context),
    )
    prompt = await while_connected(request.receive, render(context, body))
    return Generation(
        response_id=response_id,
        engine_id=engine_id,
        model=model,
        prompts=[engine_prompt(body, prompt)],
        prompt_field="messages",
        params=params,
        priority=body.priority or 0,
        add_special_tokens=bool(body.add_special_tokens),
        trace_headers=trace_headers_of(request.scope),
    )


def _num_logprobs(body: ChatCompletionRequest, context: ServerContext) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs is given without logprobs; set logprobs to true", "top_logprobs")
    check_logprobs("top_logprobs", body.top_logprobs, context.settings.max_logprobs)
    return (body.top_logprobs or 0) if body.logprobs else None


class ChatAnswer:
    """Builds the answer to one request."""

    def __init__(self, context: ServerContext, body: ChatCompletionRequest, generation: Generation) -> None:
        self._context = context
        self._generation = generation
        self._usage = UsageCounter()
        self._prefix = last_text(body) if body.echo else ""
        self._return_token_ids = bool(body.return_token_ids)
        self._include_usage, self._continuous_usage = body.wants_usage()
        self._num_top = generation.params.logprobs or 0
        self._formatter: LogprobsFormatter | None = None
        if generation.params.logprobs is not None:
            self._formatter = LogprobsFormatter(context.tokenizer(), bool(body.return_tokens_as_token_ids))

    async def body(self) -> bytes:
        (output,) = await finished_outputs(self._context, self._generation)
        self._usage.add(output)
        answer = ChatCompletion(
            self._generation.response_id,
            self._generation.created,
            self._generation.model,
            [self._choice(completion) for completion in output.outputs],
            self._usage.usage(),
        )
        if self._generation.params.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        if self._return_token_ids:
            answer.prompt_token_ids = output.prompt_token_ids
        return msgspec.json.encode(answer)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; each holds the chunks that one output came to."""
        begun: set[int] = set()
        async with aclosing(run(self._context, self._generation)) as outputs:
            async for _, output in outputs:
                chunks = self._chunks(output, begun)
                if chunks:
                    yield b"".join([event(msgspec.json.encode(chunk)) for chunk in chunks])
        if self._include_usage:
            yield event(msgspec.json.encode(self._chunk(None, self._usage.usage())))

    def _choice(self, completion: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            completion.index,
            ResponseMessage("assistant", self._prefix + completion.text),
            self._logprobs(completion),
            completion.finish_reason,
            completion.stop_reason,
            completion.token_ids if self._return_token_ids else UNSET,
        )

    def _chunks(self, output: RequestOutput, begun: set[int]) -> list[ChatCompletionChunk]:
        self._usage.add(output)
        usage: Usage | UnsetType | None = None if self._include_usage else UNSET
        if self._continuous_usage:
            usage = self._usage.usage()
        chunks: list[ChatCompletionChunk] = []
        for completion in output.outputs:
            index = completion.index
            if index not in begun:
                begun.add(index)
                first = self._chunk(ChunkChoice(index, Delta("assistant", self._prefix)), usage)
                if self._return_token_ids:
                    first.prompt_token_ids = output.prompt_token_ids
                chunks.append(first)
            # A token may have no text of its own yet, such as the first half of a character.
            if completion.text or (completion.token_ids and (self._formatter is not None or self._return_token_ids)):
                choice = ChunkChoice(index, Delta(None, completion.text), self._logprobs(completion))
                if self._return_token_ids:
                    choice.token_ids = completion.token_ids
                chunks.append(self._chunk(choice, usage))
            if completion.finish_reason is not None:
                last = ChunkChoice(index, Delta(), None, completion.finish_reason, completion.stop_reason)
                chunks.append(self._chunk(last, usage))
        return chunks

    def _chunk(self, choice: ChunkChoice | None, usage: Usage | UnsetType | None) -> ChatCompletionChunk:
        generation = self._generation
        return ChatCompletionChunk(
            generation.response_id,
            generation.created,
            generation.model,
            [] if choice is None else [choice],
            usage,
        )

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if self._formatter is None or completion.logprobs is None:
            return None
        return self._formatter.chat(completion.logprobs, self._num_top)
