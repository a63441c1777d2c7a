"""Runs one response: turns of the engine, with calls of tool servers between them, as one stream of events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET

from quire.server.context import ServerContext
from quire.server.conversation.answer import ChoicePiece, FinishReason
from quire.server.conversation.blocks import BlockEvent, BlockReader
from quire.server.errors import failure_of, responses_code
from quire.server.generation.run import run
from quire.server.generation.usage import UsageCounter
from quire.server.openai.logprobs import ChatLogprob, LogprobsFormatter
from quire.server.openai.responses.events import Event, ResponseEvents
from quire.server.openai.responses.items import Item
from quire.server.openai.responses.mcp import run_calls
from quire.server.openai.responses.prepare import Turn, TurnMaker
from quire.server.openai.responses.protocol import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    RawMessage,
    Response,
    ResponseError,
    ResponseUsage,
)
from quire.types.errors import QuireError
from quire.types.outputs import RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A checked request, ready to be run."""

    maker: TurnMaker
    first: Turn
    events: ResponseEvents
    previous: list[Item]
    """What was said in the responses before this one."""
    items: list[Item]
    formatter: LogprobsFormatter | None
    max_tokens: int | None
    """Of all turns together."""
    owner: str = ""
    """Who asked, see owner_of."""

    @property
    def response(self) -> Response:
        return self.events.response


@dataclass(slots=True)
class Tally:
    """Tokens and calls of the turns so far."""

    usage: UsageCounter = field(default_factory=UsageCounter)
    calls: int = 0
    finish: FinishReason | None = field(default=None)
    """Why the last turn ended."""


def fail(plan: Plan, error: QuireError) -> Event:
    """End a response with an error; its last event."""
    plan.response.status = "failed"
    plan.response.error = ResponseError(responses_code(failure_of(error)), str(error))
    return plan.events.end()


async def run_response(context: ServerContext, plan: Plan) -> AsyncGenerator[list[Event], None]:
    """Yield lists of events as they come; the first list is empty, when the engine has the request.

    What is on record is said again, and the rest is added to it. Another turn follows as long as the model calls only
    tools of tool servers.
    """
    tally, record = Tally(), plan.maker.record
    turn, number = plan.first, 0
    while True:
        async with aclosing(_run_turn(context, plan, turn, tally)) as batches:
            async for events in batches:
                yield events
        waiting = plan.events.waiting_calls()
        if tally.finish != "tool_calls" or not waiting:
            if waiting:
                yield [event for index, _ in waiting for event in plan.events.call_cut_short(index)]
            break
        most = plan.response.max_tool_calls
        left = None if most is None else max(0, most - tally.calls)
        async with aclosing(run_calls(context.tool_servers, plan.events, waiting, left, record)) as results:
            async for events in results:
                yield events
        tally.calls += len(waiting)
        number += 1
        tokens_left = None if plan.max_tokens is None else plan.max_tokens - tally.usage.completion_tokens
        if plan.events.has_client_calls():
            break
        if tokens_left is not None and tokens_left <= 0:
            tally.finish = "length"
            break
        may_call = number < context.settings.max_tool_turns and (most is None or tally.calls < most)
        said = msgspec.to_builtins(plan.response.output)
        turn = await plan.maker.make(number, said, may_call=may_call, max_tokens=tokens_left)
        plan.events.next_turn()
    _finish(plan.response, tally)
    yield [plan.events.end()]


async def _run_turn(
    context: ServerContext, plan: Plan, turn: Turn, tally: Tally
) -> AsyncGenerator[list[Event], None]:
    reader, blocks = turn.prepared.reader(), BlockReader()
    logprobs = LogprobsToTell(plan, turn)
    raw = RawTurn(context, plan.response) if plan.maker.body.enable_response_messages else None
    async with aclosing(run(context, turn.generation)) as outputs:
        await anext(outputs)
        if turn is plan.first:
            yield []
        async for _, output in outputs:
            events = [] if plan.events.has_begun else begin(plan)
            if raw is not None:
                raw.add(output)
            tally.usage.add(output)
            for piece in reader.read(output):
                found = blocks.read(piece.events)
                if piece.finish_reason is not None:
                    found += blocks.finish(cut_short=piece.finish_reason == "length")
                    tally.finish = piece.finish_reason
                    plan.response.schema_check = piece.schema_report or UNSET
                events += plan.events.blocks(found, logprobs.of(piece, found))
            if events:
                yield events


class RawTurn:
    """What one turn adds to the response as the model read and wrote it, for clients that ask for it."""

    def __init__(self, context: ServerContext, response: Response) -> None:
        self._tokenizer = context.tokenizer()
        self._response = response
        self._token_ids: list[int] = []

    def add(self, output: RequestOutput) -> None:
        """Take in a delta; the last one completes the turn."""
        for completion in output.outputs:
            self._token_ids += completion.token_ids
        if output.finished:
            response = self._response
            response.input_messages = [*(response.input_messages or ()), self._raw(output.prompt_token_ids)]
            response.output_messages = [*(response.output_messages or ()), self._raw(self._token_ids)]

    def _raw(self, token_ids: list[int]) -> RawMessage:
        return RawMessage(self._tokenizer.decode(token_ids, skip_special_tokens=False), token_ids)


def begin(plan: Plan) -> list[Event]:
    """The events that are known before the first token."""
    events = plan.events.begin()
    for listing in plan.maker.toolbox.listings:
        events += plan.events.listing(listing.label, listing.infos())
    plan.events.next_turn()
    return events


def _finish(response: Response, tally: Tally) -> None:
    response.completed_at = int(time.time())
    usage = tally.usage
    response.usage = ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(usage.cached_tokens),
        usage.completion_tokens,
        OutputTokensDetails(usage.reasoning_tokens),
        usage.prompt_tokens + usage.completion_tokens,
    )
    if tally.finish == "length":
        response.status = "incomplete"
        response.incomplete_details = IncompleteDetails("max_output_tokens")
    elif tally.finish == "abort":
        response.status = "cancelled"
    else:
        response.status = "completed"


class LogprobsToTell:
    """Log-probabilities of a turn's text; those of a token without text of its own come with the text behind it."""

    def __init__(self, plan: Plan, turn: Turn) -> None:
        self._formatter = plan.formatter
        self._num_top = turn.generation.params.logprobs or 0
        self._held: list[ChatLogprob] = []

    def of(self, piece: ChoicePiece, blocks: Sequence[BlockEvent]) -> list[ChatLogprob] | None:
        """What is to be told with the blocks that a piece became."""
        if self._formatter is None or piece.logprobs is None:
            return None
        told = self._held + (self._formatter.chat(piece.logprobs, self._num_top).content or [])
        self._held = [] if blocks else told
        return told
