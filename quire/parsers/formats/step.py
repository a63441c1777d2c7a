"""StepFun 3.5: calls in tags, and thinking that the prompt opens."""

from __future__ import annotations

from quire.parsers.format import ReasoningFormat, ToolFormat
from quire.parsers.formats.qwen import QWEN3_CODER

STEP3P5 = ToolFormat(
    models="Step-3.5-Flash",
    signs=(("<tool_call>", "<function=", "<parameter=", "<|im_start|>tool_response"),),
    begin=QWEN3_CODER.begin,
    call_begin=QWEN3_CODER.call_begin,
    codec=QWEN3_CODER.codec,
    end=QWEN3_CODER.end,
    one_per_section=True,
)

STEP3P5_THINKING = ReasoningFormat(
    models="Step-3.5-Flash",
    signs=(("<think>", "<|im_start|>", "<|im_start|>tool_response"),),
    begin=("<think>\n",),
    end=("\n</think>",),
    lead="\n",
)
