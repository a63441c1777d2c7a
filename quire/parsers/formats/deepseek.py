"""DeepSeek V3, R1 and V3.1: calls between special tokens; V3.2 and V4: calls in tags; R1's thinking."""

from __future__ import annotations

from quire.parsers.format import ReasoningFormat, ToolFormat
from quire.parsers.json_calls import NamedJson
from quire.parsers.xml_calls import TaggedArguments


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


def _dsml(name: str) -> str:
    return f"<{_DSML}{name}"


_DSML = "\uff5cDSML\uff5c"
_TAGS = TaggedArguments(
    name_end='">\n',
    key_begin=_dsml('parameter name="'),
    key_end='" string="false">',
    text_key_end='" string="true">',
    value_end=f"</{_DSML}parameter>\n",
    end=f"</{_DSML}invoke>",
)
DEEPSEEK_V32 = ToolFormat(
    models="DeepSeek V3.2",
    signs=((_DSML, "function_calls>"),),
    begin=(_dsml("function_calls>\n"),),
    call_begin=_dsml('invoke name="'),
    codec=_TAGS,
    between="\n",
    end=f"\n</{_DSML}function_calls>",
    special=True,
)
DEEPSEEK_V4 = ToolFormat(
    models="DeepSeek V4",
    signs=((_DSML, "'tool_calls>"),),
    begin=(_dsml("tool_calls>\n"),),
    call_begin=_dsml('invoke name="'),
    codec=_TAGS,
    between="\n",
    end=f"\n</{_DSML}tool_calls>",
    special=True,
)

DEEPSEEK_R1 = ReasoningFormat(
    models="DeepSeek R1, V3.1, V3.2, V4, Kimi K2 Thinking",
    signs=(("<think>",), ("</think>",)),
    begin=("<think>",),
    end=("</think>",),
)
