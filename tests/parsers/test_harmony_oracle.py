"""openai-harmony, the reference implementation, reads outputs as ours does.

It needs its vocabulary, which it would download: this runs where TIKTOKEN_ENCODINGS_BASE names a folder that has it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from quire.parsers.events import assemble
from quire.parsers.format import Tool
from quire.parsers.stream import make_parser
from tests.parsers.helpers import HARMONY_PROMPT, feed

VARIABLE = "TIKTOKEN_ENCODINGS_BASE"
VOCABULARY = "o200k_base.tiktoken"

pytestmark = pytest.mark.skipif(
    not (Path(os.environ.get(VARIABLE, "")) / VOCABULARY).is_file(),
    reason=f"{VARIABLE} names no folder with {VOCABULARY}, which openai-harmony needs",
)

OUTPUTS = [
    "<|channel|>final<|message|>Yes.<|return|>",
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
    "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    '<|constrain|>json<|message|>{"a": [1, "x"]}<|call|>',
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}"
    "<|call|>",
]


@pytest.fixture(scope="module")
def harmony() -> Any:
    module = pytest.importorskip("openai_harmony")
    return module, module.load_harmony_encoding(module.HarmonyEncodingName.HARMONY_GPT_OSS)


@pytest.mark.parametrize("output", OUTPUTS)
def test_the_reference_reads_the_same(harmony: Any, output: str) -> None:
    module, encoding = harmony
    tokens = encoding.encode(output, allowed_special="all")
    messages = encoding.parse_messages_from_completion_tokens(tokens, role=module.Role.ASSISTANT)
    said = [(message, "".join(part.text for part in message.content)) for message in messages]
    parsed = assemble(feed(make_parser("harmony", "harmony", prompt_text=HARMONY_PROMPT, tools=[Tool("f")]), output))
    calls = [(m.recipient.removeprefix("functions."), text) for m, text in said if m.recipient is not None]
    assert [(call.name, call.arguments) for call in parsed.calls] == calls
    free = [(message, text) for message, text in said if message.recipient is None]
    assert parsed.reasoning == "".join(text for message, text in free if message.channel == "analysis")
    assert parsed.text == "".join(text for message, text in free if message.channel != "analysis")
