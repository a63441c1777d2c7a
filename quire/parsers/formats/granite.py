"""Granite 3: a list of calls after a token, and thinking announced by tags or by sentences."""

from __future__ import annotations

from quire.parsers.format import ReasoningFormat, ToolFormat
from quire.parsers.json_calls import JsonEnvelope

GRANITE = ToolFormat(
    models="Granite 3.0 to 3.3",
    signs=(("<|tool_call|>", "<|start_of_role|>"),),
    begin=("<|tool_call|>", "<tool_call>"),
    opening="[",
    codec=JsonEnvelope(),
    between=", ",
    end="]",
    special=True,
)

GRANITE_THINKING = ReasoningFormat(
    models="Granite 3.2, 3.3",
    signs=(("<think>", "<|start_of_role|>"),),
    begin=("<think>", "Here is my thought process:", "Here's my thought process:"),
    end=("</think>", "Here is my response:", "Here's my response:"),
    answer=("<response>", "</response>"),
)
