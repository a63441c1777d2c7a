"""Qwen3: calls in tags from Qwen3-Coder on, and thinking between tags. StepFun 3.5 writes its calls the same way."""

from __future__ import annotations

from quire.parsers.format import ReasoningFormat, ToolFormat
from quire.parsers.xml_calls import TaggedArguments

QWEN3_CODER = ToolFormat(
    models="Qwen3-Coder, Qwen3.5, Nemotron 3 Nano",
    signs=(("<tool_call>", "<function=", "<parameter="),),
    begin=("<tool_call>\n",),
    call_begin="<function=",
    codec=TaggedArguments(
        name_end=">\n",
        key_begin="<parameter=",
        key_end=">\n",
        value_end="\n</parameter>\n",
        end="</function>",
        python_words=True,
    ),
    end="\n</tool_call>",
    between="\n",
    one_per_section=True,
)

QWEN3_THINKING = ReasoningFormat(
    models="Qwen3, QwQ", signs=(("<think>", "<|im_start|>"),), begin=("<think>\n",), end=("\n</think>",), lead="\n\n"
)
