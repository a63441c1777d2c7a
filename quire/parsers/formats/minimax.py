"""MiniMax M1: calls as lines of JSON; M2: several calls to a section, all in tags, and thinking in the prompt."""

from __future__ import annotations

from quire.parsers.format import ReasoningFormat, ToolFormat
from quire.parsers.json_calls import JsonEnvelope
from quire.parsers.xml_calls import TaggedArguments

MINIMAX_M1 = ToolFormat(
    models="MiniMax M1",
    signs=(("<tool_calls>", "ai name=assistant"),),
    begin=("<tool_calls>\n",),
    codec=JsonEnvelope(),
    between="\n",
    end="\n</tool_calls>",
)

MINIMAX_M2 = ToolFormat(
    models="MiniMax M2, M2.1",
    signs=(("<minimax:tool_call>", "<invoke name="),),
    begin=("<minimax:tool_call>\n",),
    call_begin='<invoke name="',
    codec=TaggedArguments(
        name_end='">\n',
        key_begin='<parameter name="',
        key_end='">',
        value_end="</parameter>\n",
        end="</invoke>",
    ),
    between="\n",
    end="\n</minimax:tool_call>",
)

MINIMAX_M2_THINKING = ReasoningFormat(
    models="MiniMax M2, M2.1", signs=(("<think>", "]~b]ai"),), begin=("<think>\n",), end=("\n</think>",), lead="\n\n"
)
