"""Messages: a checked request in, a message or a stream of events out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterable
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.thinking import thinks_between_marks
from quire.server.anthropic.convert import conversation_of
from quire.server.anthropic.events import content_block, stop_info, stream_events, usage_of
from quire.server.anthropic.protocol import (
    Message,
    MessageDelta,
    MessagesRequest,
    MessageStart,
    MessageStop,
    Ping,
    PromptFields,
    StopInfo,
    StreamEvent,
    TokenCount,
)
from quire.server.context import ServerContext
from quire.server.conversation.answer import ChoicePiece
from quire.server.conversation.blocks import BlockReader, blocks_of
from quire.server.conversation.prepare import num_tokens, prepare_conversation, render_conversation
from quire.server.errors import anthropic_error, failure_of, json_response
from quire.server.generation.field_table import NO_EFFECT_ON_PROMPTS, check_extra_fields
from quire.server.generation.request import Generation, conversation_generation, ids_of, origin_of
from quire.server.generation.run import finished_outputs, run
from quire.server.generation.usage import UsageCounter
from quire.server.middleware import request_id_of
from quire.server.sse import ACCEPTED, EventStream, named_event, while_connected
from quire.types.errors import QuireError, RequestError
from quire.types.outputs import RequestOutput
from quire.types.sampling import SamplingParams

ROUTE = "/v1/messages"
# Fields for Anthropic's own service that have no meaning here or are hints.
HINTS = frozenset(
    {
        "betas",
        "cache_control",
        "container",
        "context_management",
        "diagnostics",
        "inference_geo",
        "mcp_servers",
        "speed",
        "user_profile_id",
    }
)


async def create_message(context: ServerContext, body: MessagesRequest, request: Request) -> Response:
    model = context.check_model(body.model, "generate")
    check_fields(context, body)
    conversation = conversation_of(context, body)
    request_id = request_id_of(request.scope)
    ids = ids_of("msg_", body, request)
    prepared = await while_connected(
        request.receive, prepare_conversation(context, conversation, _params(context, body))
    )
    generation = conversation_generation(
        body, prepared, ids, origin_of(request), model=model, prompt_field="messages"
    )
    reader, answer = prepared.reader(), MessageAnswer(body, generation)
    if not body.stream:
        (output,) = await while_connected(request.receive, finished_outputs(context, generation))
        return json_response(answer.message(output, reader.read(output)[0]))

    async def events() -> AsyncGenerator[bytes, None]:
        async with aclosing(run(context, generation)) as outputs:
            _, announcement = await anext(outputs)
            answer.usage.add_prompt(announcement)
            yield ACCEPTED
            async for _, output in outputs:
                data = b"".join(encoded(answer.events(output, piece)) for piece in reader.read(output))
                if data:
                    yield data

    def failed(error: QuireError) -> bytes:
        return named_event("error", anthropic_error(failure_of(error), request_id))

    return EventStream(
        events(),
        opening=lambda: encoded(answer.begin()),
        keep_alive=lambda: encoded([Ping()]),
        failed=failed,
        end=b"",
    )


async def count_tokens(context: ServerContext, body: PromptFields) -> TokenCount:
    """The number of prompt tokens of a conversation."""
    context.check_model(body.model, "generate")
    check_fields(context, body, NO_EFFECT_ON_PROMPTS)
    prompt = await render_conversation(context, conversation_of(context, body))
    return TokenCount(await num_tokens(context, prompt))


def check_fields(context: ServerContext, body: PromptFields, no_effect: Collection[str] = ()) -> None:
    """Refuse unknown fields that must not be ignored."""
    extra = body.model_extra or {}
    if extra.get("mcp_servers"):
        raise RequestError(
            "mcp_servers is not taken: in this server tool servers are called by the Responses API", "mcp_servers"
        )
    check_extra_fields(extra, context, ROUTE, HINTS.union(no_effect))


def encoded(events: Iterable[StreamEvent]) -> bytes:
    return b"".join(
        named_event(str(type(event).__struct_config__.tag), msgspec.json.encode(event)) for event in events
    )


def _params(context: ServerContext, body: MessagesRequest) -> SamplingParams:
    given = {
        **body.sampling_fields(),
        "max_tokens": min(body.max_tokens, context.provider.engine.info.max_model_len),
        "output_kind": "delta" if body.stream else "final_only",
    }
    if body.stop_sequences:
        stop = given.get("stop", ())
        given["stop"] = [*((stop,) if isinstance(stop, str) else stop), *body.stop_sequences]
    budget = None if body.thinking is None else body.thinking.budget_tokens
    if budget is not None and thinks_between_marks(context.text):  # clients send it to every model
        given.setdefault("thinking_token_budget", budget)
    return msgspec.structs.replace(context.text.chat_params(), **given)


class MessageAnswer:
    """Builds the answer to one request."""

    def __init__(self, body: MessagesRequest, generation: Generation) -> None:
        self._generation = generation
        self._max_tokens = body.max_tokens
        self._show_thinking = body.thinking is None or body.thinking.display != "omitted"
        self._blocks = BlockReader()
        self._begun = False
        self.usage = UsageCounter()

    def message(self, output: RequestOutput, piece: ChoicePiece) -> Message:
        """The whole answer."""
        self.usage.add(output)
        blocks = blocks_of([*self._blocks.read(piece.events), *self._blocks.finish()])
        content = [content_block(block, self._show_thinking) for block in blocks]
        stop = self._stop(piece)
        message = Message(self._generation.ids.response, self._generation.model, content, usage_of(self.usage))
        message.stop_reason, message.stop_sequence = stop.stop_reason, stop.stop_sequence
        return message

    def begin(self) -> list[StreamEvent]:
        self._begun = True
        start = Message(self._generation.ids.response, self._generation.model, [], usage_of(self.usage))
        return [MessageStart(start), Ping()]

    def events(self, output: RequestOutput, piece: ChoicePiece) -> list[StreamEvent]:
        """The stream events for one output."""
        self.usage.add_prompt(output)
        events = [] if self._begun else self.begin()
        self.usage.add(output)
        blocks = self._blocks.read(piece.events)
        if piece.finish_reason is not None:
            blocks += self._blocks.finish()
        for block in blocks:
            events += stream_events(block, self._show_thinking)
        if piece.finish_reason is not None:
            events += [MessageDelta(self._stop(piece), usage_of(self.usage)), MessageStop()]
        return events

    def _stop(self, piece: ChoicePiece) -> StopInfo:
        return stop_info(piece.finish_reason, piece.stop_reason, self.usage.completion_tokens, self._max_tokens)
