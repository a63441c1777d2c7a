"""What a response is made of, as its journal keeps it: what the engine said, and the results of tool servers' calls.

The rest follows from it, the events of a response and their numbers too: outputs are recorded in the pieces in which
they were read, before anybody hears of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import msgspec

from quire.server.conversation.answer import ChoicePiece
from quire.server.openai.responses.protocol import McpError
from quire.types.events import CallArguments, CallEnd, CallStart, Event, ReasoningDelta, TextDelta
from quire.types.outputs import CompletionOutput, Logprob, LogprobsAtPosition, RequestOutput
from quire.types.request import FinishReason

_EVENTS = {kind.__name__: kind for kind in (TextDelta, ReasoningDelta, CallStart, CallArguments, CallEnd)}

# Token id, log-probability (JSON has no infinity: None), rank, text.
_Alternative = tuple[int, float | None, int | None, str | None]


class Said(msgspec.Struct, frozen=True, omit_defaults=True, tag="said"):
    """One output of the engine in a turn of the response."""

    turn: int
    token_ids: list[int]
    text: str = ""
    events: list[list[Any]] | None = None  # the name of each, then its fields; calls have their ids
    logprobs: list[list[_Alternative]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_reasoning_tokens: int = 0
    num_cached_tokens: int | None = None

    def output(self, announced: RequestOutput) -> RequestOutput:
        """The output that was recorded; `announced` is the turn's announcement."""
        events: list[Event] | None = None
        if self.events is not None:
            events = [_EVENTS[name](*fields) for name, *fields in self.events]
        completion = CompletionOutput(
            0,
            self.text,
            self.token_ids,
            None,
            None if self.logprobs is None else list(map(_position, self.logprobs)),
            self.finish_reason,
            self.stop_reason,
            events,
            self.num_reasoning_tokens,
        )
        finished = self.finish_reason is not None
        return msgspec.structs.replace(
            announced, outputs=[completion], finished=finished, num_cached_tokens=self.num_cached_tokens
        )


class Called(msgspec.Struct, frozen=True, tag="called"):
    """What a tool server answered."""

    index: int  # of the call among the response's output items
    output: str | None = None
    error: McpError | None = None


Line = Said | Called


def write_nothing(line: Line) -> None:
    """Nobody keeps a record."""


class Record:
    """The record of one response: what an earlier process left of it, and where more of it goes."""

    def __init__(self, write: Callable[[Line], None] = write_nothing, known: Iterable[Line] = ()) -> None:
        self._write = write
        self._said: dict[int, list[Said]] = {}
        self._called: dict[int, Called] = {}
        for line in known:
            if isinstance(line, Said):
                self._said.setdefault(line.turn, []).append(line)
            else:
                self._called[line.index] = line

    def said(self, turn: int) -> list[Said]:
        """The outputs of a turn that earlier processes recorded."""
        return self._said.get(turn, [])

    def add(self, turn: int, output: RequestOutput, pieces: Sequence[ChoicePiece]) -> None:
        """Record an output; `pieces` are what was read of it."""
        if self._write is write_nothing:
            return
        for completion, piece in zip(output.outputs, pieces, strict=True):
            named = None
            if completion.events is not None:
                named = [[type(event).__name__, *msgspec.structs.astuple(event)] for event in piece.events]
            self._write(
                Said(
                    turn,
                    completion.token_ids,
                    "" if named is not None else completion.text,
                    named,
                    None if completion.logprobs is None else list(map(_alternatives, completion.logprobs)),
                    completion.finish_reason,
                    completion.stop_reason,
                    completion.num_reasoning_tokens,
                    output.num_cached_tokens,
                )
            )

    def called(self, index: int) -> str | McpError | None:
        """What came of a call in an earlier process; None if nothing did."""
        found = self._called.get(index)
        return None if found is None else found.output if found.error is None else found.error

    def add_result(self, index: int, result: str | McpError) -> None:
        self._write(Called(index, result) if isinstance(result, str) else Called(index, error=result))


def token_ids_of(said: Sequence[Said]) -> list[int]:
    return list(chain.from_iterable(line.token_ids for line in said))


def _alternatives(position: LogprobsAtPosition) -> list[_Alternative]:
    return [
        (token, entry.logprob if math.isfinite(entry.logprob) else None, entry.rank, entry.decoded_token)
        for token, entry in position.items()
    ]


def _position(alternatives: list[_Alternative]) -> LogprobsAtPosition:
    return {
        token: Logprob(-math.inf if logprob is None else logprob, rank, text)
        for token, logprob, rank, text in alternatives
    }
