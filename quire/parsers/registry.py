"""The formats by name: what --tool-call-parser and --reasoning-parser may say. One line per format."""

from __future__ import annotations

from quire.parsers.format import ChannelFormat, ReasoningFormat, ToolFormat
from quire.utils.registry import Registry

TOOL_FORMATS: Registry[ToolFormat | ChannelFormat] = Registry("tool call parser", "quire.parsers.formats", {})

REASONING_FORMATS: Registry[ReasoningFormat | ChannelFormat] = Registry(
    "reasoning parser", "quire.parsers.formats", {}
)
