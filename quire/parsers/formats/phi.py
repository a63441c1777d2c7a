"""Phi-4-mini: a list of calls after the word functools or after a token. FireFunction writes functools, too."""

from __future__ import annotations

from quire.parsers.format import ToolFormat
from quire.parsers.json_calls import JsonEnvelope

PHI4_MINI = ToolFormat(
    models="Phi-4-mini, FireFunction v2",
    signs=(("functools",), ("<|tool|>", "<|/tool|>")),
    begin=("functools", "<|tool_call|>"),
    opening="[",
    codec=JsonEnvelope(),
    between=", ",
    end="]",
    ignored=("<|/tool_call|>",),
    special=True,
)
