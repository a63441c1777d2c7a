"""The record of a request: what the engine said and tool servers answered, for another process to go on after.

The rest follows from it, the bytes of an answer too: outputs are recorded in the pieces in which they are read,
before anybody hears of them. Knows outputs; where lines are kept is the journal's concern.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.requests import Request

from quire.parsers.stream import new_call_id
from quire.types.events import CallArguments, CallEnd, CallStart, Event, ReasoningDelta, TextDelta
from quire.types.outputs import CompletionOutput, Logprob, LogprobsAtPosition, RequestMetrics, RequestOutput
from quire.types.request import FinishReason

_EVENTS = {kind.__name__: kind for kind in (TextDelta, ReasoningDelta, CallStart, CallArguments, CallEnd)}

# Token id, log-probability (JSON has no infinity: None), rank, text.
_Alternative = tuple[int, float | None, int | None, str | None]


class SaidOfCompletion(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one output of the engine added to one completion."""

    token_ids: list[int]
    index: int = 0
    text: str = ""
    events: list[list[Any]] | None = None  # the name of each, then its fields; calls have their ids
    logprobs: list[list[_Alternative]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_reasoning_tokens: int = 0
    num_accepted_predictions: int = 0
    num_rejected_predictions: int = 0

    def completion(self) -> CompletionOutput:
        events: list[Event] | None = None
        if self.events is not None:
            events = [_EVENTS[name](*fields) for name, *fields in self.events]
        return CompletionOutput(
            self.index,
            self.text,
            self.token_ids,
            self.cumulative_logprob,
            None if self.logprobs is None else list(map(_position, self.logprobs)),
            self.finish_reason,
            self.stop_reason,
            events,
            self.num_reasoning_tokens,
            self.num_accepted_predictions,
            self.num_rejected_predictions,
        )


class Said(msgspec.Struct, frozen=True, omit_defaults=True, tag="said"):
    """One output of the engine, for one prompt in a turn of the request."""

    completions: list[SaidOfCompletion]
    turn: int = 0
    prompt: int = 0  # its index
    finished: bool = False
    prompt_logprobs: list[list[_Alternative] | None] | None = None
    num_cached_tokens: int | None = None
    num_without_state: int = 0

    def output(self, request_id: str, prompt: str | None, prompt_token_ids: list[int]) -> RequestOutput:
        """The output that was recorded."""
        logprobs = self.prompt_logprobs
        return RequestOutput(
            request_id,
            prompt,
            prompt_token_ids,
            [said.completion() for said in self.completions],
            self.finished,
            None if logprobs is None else [None if entry is None else _position(entry) for entry in logprobs],
            RequestMetrics(num_without_state=self.num_without_state),
            self.num_cached_tokens,
        )


class Called(msgspec.Struct, frozen=True, tag="called"):
    """What a tool server answered."""

    index: int  # of the call among the response's output items
    output: str | None = None
    error: dict[str, Any] | None = None


class Heard(msgspec.Struct, frozen=True, tag="heard"):
    """What the request refers to, in responses that no later process may know."""

    context: list[dict[str, Any]]  # said before
    input: list[dict[str, Any]]


Line = Said | Called | Heard


class Record:
    """Of one request: what earlier processes left of it, and where more of it goes."""

    def __init__(
        self,
        write: Callable[[Line], None] | None = None,
        known: Iterable[Line] = (),
        *,
        created: int | None = None,
        id_suffix: str | None = None,
    ) -> None:
        """`write` is None if nothing is kept; `created` and `id_suffix` are those of the process that began it."""
        self._write = write
        self.created = int(time.time()) if created is None else created
        self.id_suffix = secrets.token_hex(4) if id_suffix is None else id_suffix
        self.heard: Heard | None = None
        self._said: dict[int, list[Said]] = {}
        self._called: dict[int, Called] = {}
        for line in known:
            if isinstance(line, Said):
                self._said.setdefault(line.turn, []).append(line)
            elif isinstance(line, Called):
                self._called[line.index] = line
            else:
                self.heard = line

    @property
    def is_kept(self) -> bool:
        """Whether somebody keeps what is added."""
        return self._write is not None

    def said(self, turn: int) -> Sequence[Said]:
        """The outputs of a turn that earlier processes recorded, in their order."""
        return self._said.get(turn, ())

    def called(self, index: int) -> Called | None:
        """What came of a call in an earlier process; None if nothing did."""
        return self._called.get(index)

    def add(self, line: Line) -> None:
        if self._write is not None:
            self._write(line)

    def add_output(self, turn: int, prompt: int, output: RequestOutput) -> None:
        logprobs = output.prompt_logprobs
        self.add(
            Said(
                list(map(_said_of, output.outputs)),
                turn,
                prompt,
                output.finished,
                None if logprobs is None else [None if entry is None else _alternatives(entry) for entry in logprobs],
                output.num_cached_tokens,
                output.metrics.num_without_state,
            )
        )


def record_of(request: Request) -> Record:
    """The record that was opened for a request; one that nobody keeps, if none was."""
    record: Record | None = request.scope["state"].get("record")
    return Record() if record is None else record


def with_call_ids(output: RequestOutput, tool_format: str | None) -> RequestOutput:
    """The output, with an id for each call that the model has not named: the record keeps it."""
    if not any(isinstance(event, CallStart) for said in output.outputs for event in said.events or ()):
        return output

    def named(event: Event) -> Event:
        if not isinstance(event, CallStart) or event.id is not None:
            return event
        return CallStart(event.index, event.name, new_call_id(tool_format, event.name, event.index))

    return replace(
        output,
        outputs=[
            said if said.events is None else replace(said, events=[named(event) for event in said.events])
            for said in output.outputs
        ],
    )


def _said_of(completion: CompletionOutput) -> SaidOfCompletion:
    events = completion.events
    return SaidOfCompletion(
        completion.token_ids,
        completion.index,
        "" if events is not None else completion.text,
        None if events is None else [[type(event).__name__, *msgspec.structs.astuple(event)] for event in events],
        None if completion.logprobs is None else list(map(_alternatives, completion.logprobs)),
        completion.cumulative_logprob,
        completion.finish_reason,
        completion.stop_reason,
        completion.num_reasoning_tokens,
        completion.num_accepted_predictions,
        completion.num_rejected_predictions,
    )


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
