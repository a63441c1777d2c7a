"""One response from its first event to its last: asks the engine, and tells what comes back as events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from quire.server.context import ServerContext
from quire.server.conversation.answer import ChoicePiece
from quire.server.conversation.blocks import BlockReader
from quire.server.conversation.prepare import PreparedConversation
from quire.server.openai.generation import Generation, run
from quire.server.openai.logprobs import ChatLogprob, LogprobsFormatter
from quire.server.openai.responses.events import Event, ResponseEvents, reasoning_text
from quire.server.openai.responses.items import Item
from quire.server.openai.responses.protocol import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ReasoningItem,
    Response,
    ResponseError,
    ResponseUsage,
)
from quire.types.errors import QuireError
from quire.types.outputs import RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A checked request, ready to be run."""

    generation: Generation
    prepared: PreparedConversation
    events: ResponseEvents
    previous: list[Item]
    """What was said in the responses before this one."""
    items: list[Item]
    formatter: LogprobsFormatter | None

    @property
    def response(self) -> Response:
        return self.events.response


async def run_turn(context: ServerContext, turn: Turn) -> AsyncGenerator[list[Event], None]:
    """The events of a response, as they come. What fails before the first is raised; what fails later is told."""
    begun = False
    try:
        async with aclosing(_answer(context, turn)) as batches:
            async for events in batches:
                begun = True
                yield events
    except QuireError as error:
        if not begun:
            raise
        turn.response.status = "failed"
        turn.response.error = ResponseError("server_error", str(error))
        yield [turn.events.end()]


async def _answer(context: ServerContext, turn: Turn) -> AsyncGenerator[list[Event], None]:
    reader, blocks = turn.prepared.reader(), BlockReader()
    begun = False
    output_tokens = 0
    async with aclosing(run(context, turn.generation)) as outputs:
        async for _, output in outputs:
            events = [] if begun else turn.events.begin()
            begun = True
            for piece in reader.read(output):
                output_tokens += len(piece.token_ids)
                found = blocks.read(piece.events)
                if piece.finish_reason is not None:
                    found += blocks.finish()
                events += turn.events.blocks(found, _logprobs(turn, piece))
                if piece.finish_reason is not None:
                    turn.response.usage = _usage(context, turn.response, output, output_tokens)
                    _finish(turn.response, piece)
                    events.append(turn.events.end())
            if events:
                yield events


def _finish(response: Response, piece: ChoicePiece) -> None:
    response.completed_at = int(time.time())
    if piece.finish_reason == "length":
        response.status = "incomplete"
        response.incomplete_details = IncompleteDetails("max_output_tokens")
    elif piece.finish_reason == "abort":
        response.status = "cancelled"
    else:
        response.status = "completed"


def _logprobs(turn: Turn, piece: ChoicePiece) -> list[ChatLogprob] | None:
    if turn.formatter is None or piece.logprobs is None:
        return None
    return turn.formatter.chat(piece.logprobs, turn.generation.params.logprobs or 0).content


def _usage(context: ServerContext, response: Response, output: RequestOutput, output_tokens: int) -> ResponseUsage:
    thinking = "".join(reasoning_text(item) for item in response.output if isinstance(item, ReasoningItem))
    prompt = len(output.prompt_token_ids)
    return ResponseUsage(
        prompt,
        InputTokensDetails(output.num_cached_tokens or 0),
        output_tokens,
        OutputTokensDetails(len(context.tokenizer().encode(thinking, False)) if thinking else 0),
        prompt + output_tokens,
    )
