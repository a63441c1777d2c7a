"""Hermes, and those who took over its calls: Qwen2.5, Qwen3, QwQ, Granite 4 and others."""

from __future__ import annotations

from quire.parsers.format import ToolFormat
from quire.parsers.json_calls import JsonEnvelope

HERMES = ToolFormat(
    models="Hermes 2 Pro and 3, Qwen2.5, Qwen3, QwQ, Granite 4",
    signs=(("<tool_call>", '"name": '), ("<tool_call>", '\\"name\\": ')),
    call_begin="<tool_call>\n",
    codec=JsonEnvelope(),
    call_end="\n</tool_call>",
    between="\n",
)
