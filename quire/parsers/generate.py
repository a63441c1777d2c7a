"""Writes a turn as a model that keeps to a format would: what parsers and grammars are tested with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.parsers.format import ChannelFormat, ReasoningFormat, ToolFormat
from quire.parsers.json_scan import to_json
from quire.parsers.registry import REASONING_FORMATS, TOOL_FORMATS


@dataclass(frozen=True)
class Turn:
    text: str = ""
    reasoning: str = ""
    calls: Sequence[tuple[str, Mapping[str, Any]]] = ()


def render_turn(
    turn: Turn, tool_format: str | None, reasoning_format: str | None = None, reasoning_open: bool = False
) -> str:
    """The output for this turn. `reasoning_open`: the prompt has begun the thinking already."""
    tool = None if tool_format is None else TOOL_FORMATS.get(tool_format)
    reasoning = None if reasoning_format is None else REASONING_FORMATS.get(reasoning_format)
    channels = next((layout for layout in (tool, reasoning) if isinstance(layout, ChannelFormat)), None)
    if channels is not None:
        return _render_channels(channels, turn)
    thinking = ""
    if isinstance(reasoning, ReasoningFormat) and (turn.reasoning or reasoning_open):
        begin = "" if reasoning_open else reasoning.begin[0]
        thinking = f"{begin}{turn.reasoning}{reasoning.end[0]}{reasoning.lead}"
    calls = render_calls(tool, turn.calls) if isinstance(tool, ToolFormat) and turn.calls else ""
    return thinking + turn.text + ("\n" if turn.text and calls else "") + calls


def render_calls(layout: ToolFormat, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    written = [
        layout.call_begin + layout.codec.render(name, arguments, index) + layout.call_end
        for index, (name, arguments) in enumerate(calls)
    ]
    begin = layout.begin[0] if layout.begin and not layout.bare else ""
    if layout.one_per_section:
        return layout.between.join(begin + layout.opening + call + layout.end for call in written)
    return begin + layout.opening + layout.between.join(written) + layout.end


def _render_channels(layout: ChannelFormat, turn: Turn) -> str:
    """Thinking, then text: as a preamble if calls follow, or else as the answer. Each call is a message."""
    messages = []
    if turn.reasoning:
        messages.append(f"{layout.channel}{layout.hidden_channel}{layout.message}{turn.reasoning}")
    if turn.text:
        channel = layout.call_channel if turn.calls else layout.text_channel
        messages.append(f"{layout.channel}{channel}{layout.message}{turn.text}")
    for name, arguments in turn.calls:
        to = f" to={layout.namespace}{name}"
        head = f"{to}{layout.channel}{layout.call_channel} {layout.constrain}json{layout.message}"
        messages.append(head + to_json(arguments))
    return f"{layout.ends[0]}{layout.start}assistant".join(messages) + (layout.ends[-1] if turn.calls else "")
