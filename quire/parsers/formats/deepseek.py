"""DeepSeek V3, R1 and V3.1: calls between special tokens; R1's thinking."""

from __future__ import annotations

from quire.parsers.format import ReasoningFormat, ToolFormat
from quire.parsers.json_calls import NamedJson


def _token(name: str) -> str:
    """The bars are full-width ones."""
    return f"<\uff5c{name}\uff5c>"


DEEPSEEK_V3 = ToolFormat(
    models="DeepSeek V3, R1 and its distillations",
    signs=((_token("tool▁calls▁begin"), "```json"),),
    begin=(_token("tool▁calls▁begin"),),
    call_begin=_token("tool▁call▁begin"),
    codec=NamedJson(prefix="function" + _token("tool▁sep"), name_end="\n```json\n", json_end="\n```"),
    call_end=_token("tool▁call▁end"),
    between="\n",
    end=_token("tool▁calls▁end"),
    special=True,
)

DEEPSEEK_V31 = ToolFormat(
    models="DeepSeek V3.1",
    signs=((_token("tool▁calls▁begin"),),),
    begin=(_token("tool▁calls▁begin"),),
    call_begin=_token("tool▁call▁begin"),
    codec=NamedJson(name_end=_token("tool▁sep")),
    call_end=_token("tool▁call▁end"),
    end=_token("tool▁calls▁end"),
    special=True,
)

DEEPSEEK_R1 = ReasoningFormat(
    models="DeepSeek R1, V3.1, V3.2, Kimi K2 Thinking",
    signs=(("<think>",), ("</think>",)),
    begin=("<think>",),
    end=("</think>",),
)
