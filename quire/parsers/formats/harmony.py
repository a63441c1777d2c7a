"""gpt-oss: messages on channels. Analysis is hidden, preambles and answers are seen, calls have recipients."""

from __future__ import annotations

from quire.parsers.format import ChannelFormat

HARMONY = ChannelFormat(
    models="gpt-oss",
    signs=(("<|start|>", "<|channel|>", "<|message|>"),),
    start="<|start|>",
    channel="<|channel|>",
    message="<|message|>",
    constrain="<|constrain|>",
    ends=("<|end|>", "<|return|>", "<|call|>"),
    hidden_channel="analysis",
    text_channel="final",
    call_channel="commentary",
    namespace="functions.",
)
