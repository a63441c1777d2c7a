"""The lines of Ollama's streams, and the answers that they add up to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec
from msgspec import UNSET

from quire.frontend.tokenizer import Tokenizer
from quire.parsers.json_scan import parse_object, to_json
from quire.server.conversation.answer import ChoicePiece
from quire.server.conversation.blocks import Block, BlockDelta, BlockReader, BlockStart
from quire.server.generation.usage import UsageCounter
from quire.server.ollama.protocol import DoneReason, Function, Line, Logprob, Message, TokenLogprob, ToolCall
from quire.types.outputs import LogprobsAtPosition, RequestMetrics, RequestOutput

_LEAST = -9999.0  # what JSON can say instead of minus infinity


def timestamp(seconds: float | None = None) -> str:
    """A time as Ollama writes it; now, if none is given."""
    when = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return when.isoformat().replace("+00:00", "Z")


@dataclass(slots=True)
class Parts:
    """What came of an answer: text, thinking and whole calls."""

    text: str = ""
    thinking: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.thinking or self.calls)


class RunAnswer:
    """Builds the answer to one request to chat or, with `is_chat` false, to generate."""

    def __init__(self, model: str, tokenizer: Tokenizer | None, *, is_chat: bool, num_top: int, shows_context: bool):
        self._model = model
        self._tokenizer = tokenizer
        self._is_chat = is_chat
        self._num_top = num_top
        self._context: list[int] | None = [] if shows_context else None
        self._blocks = BlockReader()
        self._call = Block("call")
        self._num_calls = 0
        self.usage = UsageCounter()

    def whole(self, output: RequestOutput, piece: ChoicePiece) -> Line:
        """The answer in one piece."""
        self._count(output)
        return self._last(output, piece, self._parts(piece))

    def lines(self, output: RequestOutput, piece: ChoicePiece) -> list[Line]:
        """What a streamed output adds; the last line says how the answer ended."""
        self._count(output)
        lines = []
        parts = self._parts(piece)
        if parts:
            lines.append(self._line(parts, piece.logprobs))
        if piece.finish_reason is not None:
            lines.append(self._last(output, piece, Parts(), with_logprobs=not parts))
        return lines

    def empty(self) -> Line:
        """A line that adds nothing, for streams that are silent for long."""
        return self._line(Parts(), None)

    def loaded(self, is_unloaded: bool) -> Line:
        """The answer to a request without a prompt."""
        line = self._line(Parts(), None)
        line.done, line.done_reason = True, "unload" if is_unloaded else "load"
        return line

    def _count(self, output: RequestOutput) -> None:
        self.usage.add(output)
        if self._context is not None:
            self._context += output.outputs[0].token_ids

    def _line(self, parts: Parts, logprobs: Sequence[LogprobsAtPosition] | None) -> Line:
        line = Line(model=self._model, created_at=timestamp())
        thinking = parts.thinking or UNSET
        if self._is_chat:
            line.message = Message(parts.text, thinking, parts.calls or UNSET)
        else:
            line.response, line.thinking = parts.text, thinking
        if logprobs:
            line.logprobs = [self._logprob(position) for position in logprobs]
        return line

    def _last(self, output: RequestOutput, piece: ChoicePiece, parts: Parts, with_logprobs: bool = True) -> Line:
        line = self._line(parts, piece.logprobs if with_logprobs else None)
        reason: DoneReason = "length" if piece.finish_reason == "length" else "stop"
        line.done, line.done_reason = True, reason
        line.prompt_eval_count, line.eval_count = self.usage.prompt_tokens, self.usage.completion_tokens
        times = durations(output.metrics)
        line.total_duration, line.load_duration, line.prompt_eval_duration, line.eval_duration = times
        line.schema_check = piece.schema_report or UNSET
        if self._context is not None:
            line.context = [*output.prompt_token_ids, *self._context]
        return line

    def _parts(self, piece: ChoicePiece) -> Parts:
        events = self._blocks.read(piece.events)
        if piece.finish_reason is not None:
            events += self._blocks.finish()
        parts = Parts()
        for event in events:
            if event.kind == "call":
                if isinstance(event, BlockStart):
                    self._call = Block("call", name=event.name, call_id=event.call_id)
                elif isinstance(event, BlockDelta):
                    self._call.text += event.text
                elif event.complete:
                    parts.calls.append(self._tool_call())
            elif isinstance(event, BlockDelta):
                if event.kind == "text":
                    parts.text += event.text
                else:
                    parts.thinking += event.text
        return parts

    def _tool_call(self) -> ToolCall:
        text = self._call.text or "{}"
        with suppress(ValueError):  # nested deeper than this process reads: handed out as it was written
            text = to_json(parse_object(text))
        function = Function(self._call.name, msgspec.Raw(text.encode()), self._num_calls)
        self._num_calls += 1
        return ToolCall(self._call.call_id, function)

    def _logprob(self, position: LogprobsAtPosition) -> Logprob:
        (chosen, *_) = position  # the sampled token comes first, then the top logprobs
        ranked = sorted(position, key=lambda token: position[token].rank or 0)[: self._num_top]
        first = self._named(chosen, position)
        return Logprob(first.token, first.logprob, first.bytes, [self._named(token, position) for token in ranked])

    def _named(self, token: int, position: LogprobsAtPosition) -> TokenLogprob:
        assert self._tokenizer is not None
        logprob = position[token].logprob
        return TokenLogprob(
            self._tokenizer.token_text(token),
            logprob if math.isfinite(logprob) else _LEAST,
            list(self._tokenizer.token_bytes(token)),
        )


def durations(metrics: RequestMetrics) -> tuple[int, int, int, int]:
    """In nanoseconds: the whole, the wait before the first step, the prompt, and the tokens after the first."""
    end = metrics.finished_time or metrics.first_token_time or metrics.arrival_time
    first = metrics.first_token_time or end
    waited = metrics.queue_time or 0.0
    seconds = (end - metrics.arrival_time, waited, first - metrics.arrival_time - waited, end - first)
    total, load, prompt, tokens = (nanoseconds(value) for value in seconds)
    return total, load, prompt, tokens


def nanoseconds(seconds: float) -> int:
    """At least 1: clients divide by durations."""
    return max(1, round(seconds * 1e9))
