"""Kimi K2: calls between special tokens, named by their ids."""

from __future__ import annotations

from quire.parsers.format import ToolFormat
from quire.parsers.json_calls import NamedJson

KIMI_K2 = ToolFormat(
    models="Kimi K2, K2 Thinking",
    signs=(("<|tool_calls_section_begin|>",),),
    begin=("<|tool_calls_section_begin|>",),
    call_begin="<|tool_call_begin|>",
    codec=NamedJson(name_end="<|tool_call_argument_begin|>", name_is_id=True),
    call_end="<|tool_call_end|>",
    end="<|tool_calls_section_end|>",
    special=True,
    id_style="kimi",
)
