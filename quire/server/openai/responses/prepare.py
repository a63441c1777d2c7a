"""Makes a Responses request ready to run: its checks, its conversation so far, and each turn of the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.server.context import ServerContext
from quire.server.conversation.prepare import PreparedConversation, prepare_conversation
from quire.server.conversation.request import AUTO, NONE
from quire.server.generation.field_table import check_extra_fields
from quire.server.generation.record import Record
from quire.server.generation.request import Generation, Ids, Origin, conversation_generation
from quire.server.openai.responses.convert import Toolbox, conversation_of
from quire.server.openai.responses.items import Item
from quire.server.openai.responses.protocol import ResponsesRequest
from quire.server.openai.responses.truncation import fitted
from quire.types.errors import RequestError
from quire.types.sampling import SamplingParams

ROUTE = "/v1/responses"
# Fields that have no meaning here or are hints.
HINTS = frozenset({"prompt_cache_options", "client_metadata"})
UNSUPPORTED = {
    "conversation": "send previous_response_id, or all items as input",
    "prompt": "send the prompt's text as instructions and input",
}


@dataclass(frozen=True, slots=True)
class Turn:
    """One request to the engine, and how its answer is read."""

    generation: Generation
    prepared: PreparedConversation


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnMaker:
    """Makes the turns of one response: the first, and those that follow the calls of tool servers."""

    context: ServerContext
    body: ResponsesRequest
    response_id: str
    model: str
    toolbox: Toolbox
    params: SamplingParams
    items: Sequence[Item]
    origin: Origin
    record: Record

    async def make(
        self, number: int, said: Sequence[Item], *, may_call: bool = True, max_tokens: int | None = None
    ) -> Turn:
        """Turn `number`; `said` are the output items of the turns before it."""
        context, body = self.context, self.body
        conversation = conversation_of(context, body, [*self.items, *said], self.toolbox)
        if number > 0:  # what the client asked to be called has been called
            conversation = dataclasses.replace(conversation, tool_choice=AUTO if may_call else NONE)
        if body.truncation == "auto":
            room = context.provider.engine.info.max_model_len - min(max_tokens or 1, 1 << 10)
            conversation = await fitted(context, conversation, max(1, room))
        params = self.params if max_tokens is None else msgspec.structs.replace(self.params, max_tokens=max_tokens)
        prepared = await prepare_conversation(context, conversation, params)
        ids = Ids(self.response_id, self.response_id if number == 0 else f"{self.response_id}-turn{number}")
        generation = conversation_generation(
            body,
            prepared,
            ids,
            self.origin,
            model=self.model,
            prompt_field="input",
            record=self.record,
            turn=number,
        )
        return Turn(generation, prepared)


def params_of(context: ServerContext, body: ResponsesRequest) -> SamplingParams:
    given: dict[str, Any] = {**body.sampling_fields(), "output_kind": "delta"}
    if body.top_logprobs or "message.output_text.logprobs" in (body.include or ()):
        given["logprobs"] = body.top_logprobs or 0
    return msgspec.structs.replace(context.text.chat_params(), **given)


def max_tokens_of(context: ServerContext, body: ResponsesRequest) -> int | None:
    """The most output tokens of all turns together."""
    if body.max_output_tokens is None:
        return None
    return min(body.max_output_tokens, context.provider.engine.info.max_model_len)


def check_fields(context: ServerContext, body: ResponsesRequest) -> None:
    """Refuse unknown fields that must not be ignored."""
    extra = body.model_extra or {}
    for name, instead in UNSUPPORTED.items():
        if extra.get(name) is not None:
            raise RequestError(f"{name} is not supported by this server; {instead}", name)
    check_extra_fields(extra, context, ROUTE, HINTS)
