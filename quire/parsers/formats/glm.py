"""GLM 4.5 to 4.7: a name, then pairs of keys and values, all in tags."""

from __future__ import annotations

from quire.parsers.format import ReasoningFormat, ToolFormat
from quire.parsers.xml_calls import TaggedArguments

GLM45 = ToolFormat(
    models="GLM 4.5, 4.6, 4.7, Laguna",
    signs=(("<tool_call>", "<arg_key>", "<arg_value>"),),
    call_begin="<tool_call>",
    codec=TaggedArguments(
        name_end="\n",
        key_begin="<arg_key>",
        key_end="</arg_key>\n<arg_value>",
        value_end="</arg_value>\n",
        end="</tool_call>",
    ),
    between="\n",
)

GLM45_THINKING = ReasoningFormat(
    models="GLM 4.5, 4.6, 4.7", signs=(("<think>", "[gMASK]"),), begin=("<think>",), end=("</think>",), lead="\n"
)
