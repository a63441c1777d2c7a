"""Chat completions: a checked request in, a body or a stream of chunks out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.parsers.events import CallEnd, Event, ReasoningDelta, assemble
from quire.server.context import ServerContext
from quire.server.conversation.answer import ChoicePiece
from quire.server.conversation.prepare import PreparedConversation, prepare_conversation
from quire.server.errors import json_response
from quire.server.generation.field_table import check_extra_fields
from quire.server.generation.record import record_of
from quire.server.generation.request import Generation, conversation_generation, ids_of, origin_of
from quire.server.generation.run import finished_outputs, run
from quire.server.generation.usage import UsageCounter
from quire.server.openai.chat.deltas import delta_of, response_message
from quire.server.openai.chat.messages import conversation_of, last_text
from quire.server.openai.chat.protocol import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChunkChoice,
    Delta,
)
from quire.server.openai.logprobs import ChatLogprobs, prompt_logprobs
from quire.server.openai.sampling import beam_search_params, check_logprobs, check_stream_options, sampling_params
from quire.server.openai.shown import Shown
from quire.server.openai.usage import Usage, usage_of
from quire.server.sse import ACCEPTED, EventStream, event, while_connected
from quire.types.errors import RequestError
from quire.types.outputs import RequestOutput

ROUTE = "/v1/chat/completions"


async def create_chat_completion(context: ServerContext, body: ChatCompletionRequest, request: Request) -> Response:
    generation, prepared = await make_generation(context, body, request)
    answer = ChatAnswer(context, body, generation, prepared)
    if body.stream:
        return EventStream(answer.events())
    return json_response(await while_connected(request.receive, answer.body()))


async def make_generation(
    context: ServerContext, body: ChatCompletionRequest, request: Request
) -> tuple[Generation, PreparedConversation]:
    """Check everything that can be checked without the engine."""
    model = context.check_model(body.model, "generate")
    check_extra_fields(body.model_extra or {}, context, ROUTE)
    check_stream_options(body)
    ids = ids_of("chatcmpl-", body, request)
    engine = context.provider.engine
    params = sampling_params(
        body,
        context.text.chat_params(),
        context.settings,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        max_model_len=engine.info.max_model_len,
        logprobs=_num_logprobs(body, context),
    )
    conversation = conversation_of(context, body)
    prepared = await while_connected(request.receive, prepare_conversation(context, conversation, params))
    generation = conversation_generation(
        body,
        prepared,
        ids,
        origin_of(request),
        model=model,
        prompt_field="messages",
        add_special_tokens=bool(body.add_special_tokens),
        beam_search=beam_search_params(
            body, prepared.params, context.text.chat_params(), context.settings, engine.info.max_model_len
        ),
        record=record_of(request),
    )
    return generation, prepared


def _num_logprobs(body: ChatCompletionRequest, context: ServerContext) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs is given without logprobs; set logprobs to true", "top_logprobs")
    check_logprobs("top_logprobs", body.top_logprobs, context.settings.max_logprobs)
    return (body.top_logprobs or 0) if body.logprobs else None


class ChatAnswer:
    """Builds the answer to one request."""

    def __init__(
        self,
        context: ServerContext,
        body: ChatCompletionRequest,
        generation: Generation,
        prepared: PreparedConversation,
    ) -> None:
        self._context = context
        self._generation = generation
        self._reader = prepared.reader()
        self._may_call = prepared.may_call
        self._usage = UsageCounter(has_prediction=body.prediction is not None)
        self._prefix = last_text(body) if body.echo else ""
        self._include_reasoning = body.include_reasoning is not False
        self._num_top = generation.params.logprobs or 0
        self._shown = Shown(context, body, with_logprobs=generation.params.logprobs is not None)

    async def body(self) -> bytes:
        (output,) = await finished_outputs(self._context, self._generation)
        self._usage.add(output)
        answer = ChatCompletion(
            self._generation.ids.response,
            self._generation.created,
            self._generation.model,
            [self._choice(piece) for piece in self._reader.read(output)],
            usage_of(self._usage),
        )
        if self._shown.names_prompt_logprobs:
            answer.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        answer.prompt_token_ids = self._shown.token_ids(output.prompt_token_ids)
        return msgspec.json.encode(answer)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, one for each output, with all its chunks."""
        begun: set[int] = set()
        async with aclosing(run(self._context, self._generation)) as outputs:
            await anext(outputs)
            yield ACCEPTED
            async for _, output in outputs:
                chunks = self._chunks(output, begun)
                if chunks:
                    yield b"".join([event(msgspec.json.encode(chunk)) for chunk in chunks])
        if self._shown.with_usage:
            yield event(msgspec.json.encode(self._chunk(None, usage_of(self._usage))))

    def _choice(self, piece: ChoicePiece) -> ChatChoice:
        return ChatChoice(
            piece.index,
            response_message(assemble(piece.events), self._prefix, self._may_call, self._include_reasoning),
            self._logprobs(piece),
            piece.finish_reason,
            piece.stop_reason,
            self._shown.token_ids(piece.token_ids),
            piece.schema_report or UNSET,
        )

    def _chunks(self, output: RequestOutput, begun: set[int]) -> list[ChatCompletionChunk]:
        self._usage.add_prompt(output)
        before = self._shown.chunk_usage(self._usage)  # the first chunk of a choice has its role and no token
        self._usage.add(output)
        usage = self._shown.chunk_usage(self._usage)
        pieces = self._reader.read(output)
        new = [piece.index for piece in pieces if piece.index not in begun]
        begun.update(new)
        chunks = [self._first_chunk(index, output, before) for index in new]
        for piece in pieces:
            chunks += [self._chunk(choice, usage) for choice in self._choices(piece)]
            if piece.finish_reason is not None:
                last = self._chunk_choice(piece.index, Delta())
                last.finish_reason, last.stop_reason = piece.finish_reason, piece.stop_reason
                last.schema_check = piece.schema_report or UNSET
                chunks.append(self._chunk(last, usage))
        return chunks

    def _first_chunk(self, index: int, output: RequestOutput, usage: Usage | UnsetType | None) -> ChatCompletionChunk:
        """The chunk with the role. Its content is null, not empty, if the answer may be calls alone."""
        content = self._prefix if self._prefix or not self._may_call else None
        first = self._chunk(self._chunk_choice(index, Delta("assistant", content)), usage)
        first.prompt_token_ids = self._shown.token_ids(output.prompt_token_ids)
        return first

    def _choices(self, piece: ChoicePiece) -> list[ChunkChoice]:
        """A chunk choice for each event of a piece; the first one also has the piece's tokens."""
        deltas = [delta_of(said) for said in piece.events if self._is_shown(said)]
        # A token may have no text of its own, such as the first half of a character.
        if not deltas and piece.token_ids and self._shown.tokens:
            deltas = [Delta()]
        choices = [self._chunk_choice(piece.index, delta) for delta in deltas]
        if choices:
            choices[0].logprobs = self._logprobs(piece)
            choices[0].token_ids = self._shown.token_ids(piece.token_ids)
        return choices

    def _chunk_choice(self, index: int, delta: Delta) -> ChunkChoice:
        return ChunkChoice(index, delta, token_ids=self._shown.token_ids(None))

    def _is_shown(self, said: Event) -> bool:
        return not isinstance(said, CallEnd) and (self._include_reasoning or not isinstance(said, ReasoningDelta))

    def _chunk(self, choice: ChunkChoice | None, usage: Usage | UnsetType | None) -> ChatCompletionChunk:
        generation = self._generation
        return ChatCompletionChunk(
            generation.ids.response,
            generation.created,
            generation.model,
            [] if choice is None else [choice],
            usage,
            self._shown.token_ids(None),
        )

    def _logprobs(self, piece: ChoicePiece) -> ChatLogprobs | None:
        if self._shown.formatter is None or piece.logprobs is None:
            return None
        return self._shown.formatter.chat(piece.logprobs, self._num_top)
