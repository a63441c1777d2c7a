"""Makes an answer of a model's outputs: events of text, reasoning and calls with ids; the same streamed or at once.

Knows outputs and their events; what an event looks like in JSON is decided by the endpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from quire.parsers.events import CallEnd, CallStart, Event, ReasoningDelta, TextDelta, joined
from quire.server.conversation.schema_check import SchemaCheck, SchemaReport
from quire.types.outputs import CompletionOutput, LogprobsAtPosition, RequestOutput

FinishReason = Literal["stop", "length", "tool_calls", "repetition", "abort", "error"]

MakeCallId = Callable[[str, int], str]


@dataclass(slots=True)
class ChoicePiece:
    """What one output added to one choice."""

    index: int
    events: list[Event]
    token_ids: list[int]
    logprobs: list[LogprobsAtPosition] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    schema_report: SchemaReport | None = None
    """With the finish reason, if the schema of the answer was not enforced as a whole."""


class ChoiceReader:
    """The events of one choice. Every CallStart has an id; indexes count from 0 without gaps."""

    __slots__ = ("_has_called", "_max_calls", "_new_id", "_schema_check", "_text")

    def __init__(
        self, new_id: MakeCallId, max_calls: int | None = None, schema_check: SchemaCheck | None = None
    ) -> None:
        """`new_id` names a call that the model has not named itself; calls past `max_calls` are left out."""
        self._new_id = new_id
        self._max_calls = max_calls
        self._schema_check = schema_check
        self._text: list[str] = []  # for the check
        self._has_called = False

    def read(self, output: CompletionOutput) -> ChoicePiece:
        """Take in what is new of a completion, or all of it."""
        events = output.events
        if events is None:
            events = [TextDelta(output.text)] if output.text else []
        reason: FinishReason | None = output.finish_reason
        if len(events) > 1 or (events and not isinstance(events[0], TextDelta)):
            events = [self._named(event) for event in joined(events) if self._is_wanted(event)]
        if reason == "stop" and self._has_called:
            reason = "tool_calls"
        return ChoicePiece(
            output.index,
            events,
            output.token_ids,
            output.logprobs,
            reason,
            output.stop_reason,
            None if self._schema_check is None else self._report(self._schema_check, events, reason),
        )

    def _report(self, check: SchemaCheck, events: list[Event], reason: FinishReason | None) -> SchemaReport | None:
        self._text += [event.text for event in events if isinstance(event, TextDelta)]
        # An answer that consists of calls or has failed is not checked.
        return check.report("".join(self._text)) if self._text and reason in ("stop", "length") else None

    def _is_wanted(self, event: Event) -> bool:
        if isinstance(event, (TextDelta, ReasoningDelta)) or self._max_calls is None:
            return True
        return event.index < self._max_calls

    def _named(self, event: Event) -> Event:
        if isinstance(event, CallStart) and event.id is None:
            return CallStart(event.index, event.name, self._new_id(event.name, event.index))
        if isinstance(event, CallEnd):
            self._has_called = self._has_called or event.complete
        return event


class AnswerReader:
    """Reads all choices of one request."""

    __slots__ = ("_make_reader", "_readers")

    def __init__(self, make_reader: Callable[[], ChoiceReader]) -> None:
        self._make_reader = make_reader
        self._readers: dict[int, ChoiceReader] = {}

    def read(self, output: RequestOutput) -> list[ChoicePiece]:
        pieces = []
        for completion in output.outputs:
            reader = self._readers.get(completion.index)
            if reader is None:
                reader = self._readers[completion.index] = self._make_reader()
            pieces.append(reader.read(completion))
        return pieces
