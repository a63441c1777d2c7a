"""The events of a streamed message, and the message they add up to. Pure functions over blocks."""

from __future__ import annotations

import msgspec
from pydantic_core import from_json

from quire.parsers.json_scan import parse_object, to_json
from quire.server.anthropic.protocol import (
    BlockDeltaEvent,
    BlockStartEvent,
    BlockStopEvent,
    ContentBlock,
    InputJsonDelta,
    SignatureDelta,
    StopInfo,
    StopReason,
    StreamEvent,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    Usage,
)
from quire.server.conversation.answer import FinishReason
from quire.server.conversation.blocks import Block, BlockDelta, BlockEvent, BlockStart
from quire.server.generation.usage import UsageCounter

# Clients hand a block of thinking back with its signature; here it is enough that there is one.
SIGNATURE = "quire"


def stream_events(event: BlockEvent, show_thinking: bool) -> list[StreamEvent]:
    """The stream events for one block event. Thinking that is not shown leaves an empty block with a signature."""
    position = event.position
    if isinstance(event, BlockStart):
        return [BlockStartEvent(position, _empty(event))]
    if isinstance(event, BlockDelta):
        if event.kind == "text":
            return [BlockDeltaEvent(position, TextDelta(event.text))]
        if event.kind == "call":
            return [BlockDeltaEvent(position, InputJsonDelta(event.text))] if event.text else []
        return [BlockDeltaEvent(position, ThinkingDelta(event.text))] if show_thinking else []
    last: list[StreamEvent] = [BlockStopEvent(position)]
    if event.kind == "reasoning":
        last.insert(0, BlockDeltaEvent(position, SignatureDelta(SIGNATURE)))
    return last


def content_block(block: Block, show_thinking: bool) -> ContentBlock:
    if block.kind == "text":
        return TextBlock(block.text)
    if block.kind == "reasoning":
        return ThinkingBlock(block.text if show_thinking else "", SIGNATURE)
    return ToolUseBlock(block.call_id, block.name, _input(block))


def usage_of(counter: UsageCounter) -> Usage:
    """Anthropic counts the tokens read from the cache apart from the others."""
    cached = counter.cached_tokens
    return Usage(counter.prompt_tokens - cached, counter.completion_tokens, cached)


def stop_info(finish: FinishReason | None, stop: int | str | None, output_tokens: int, max_tokens: int) -> StopInfo:
    """Why the message ended, in Anthropic's words; `stop` is the stop string or token that was met."""
    if finish == "stop" and isinstance(stop, str):
        return StopInfo("stop_sequence", stop)
    reason: StopReason | None = None
    if finish == "length":
        reason = "max_tokens" if output_tokens >= max_tokens else "model_context_window_exceeded"
    elif finish == "tool_calls":
        reason = "tool_use"
    elif finish is not None:
        reason = "end_turn"
    return StopInfo(reason, None)


def _empty(start: BlockStart) -> ContentBlock:
    if start.kind == "text":
        return TextBlock("")
    if start.kind == "reasoning":
        return ThinkingBlock("", "")
    return ToolUseBlock(start.call_id, start.name, msgspec.Raw(b"{}"))


def _input(block: Block) -> msgspec.Raw:
    """The arguments as an object; of a call that was cut short, those that are there and can be read."""
    text = block.text or "{}"
    try:
        text = to_json(parse_object(text) if block.complete else from_json(text, allow_partial=True))
    except ValueError:
        # Whole arguments are nested deeper than this process can read: the client gets them as they were written.
        text = text if block.complete else "{}"
    return msgspec.Raw(text.encode())
