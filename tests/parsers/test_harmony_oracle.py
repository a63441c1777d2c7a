"""openai-harmony, the reference implementation, writes conversations and reads them as ours does, cut anywhere.

It needs its vocabulary, which it would download; litellm has a copy, under the name that tiktoken's cache gives it.
"""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.parsers.events import ParsedOutput, assemble
from quire.parsers.format import Tool
from quire.parsers.stream import make_parser
from tests.parsers.helpers import HARMONY_PROMPT, feed, values

oracle = pytest.importorskip("openai_harmony")

COPY = "litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790"
VOCABULARY = "o200k_base.tiktoken"
TOOLS = [Tool("f"), Tool("get_weather")]
OUTPUTS = [
    "<|channel|>final<|message|>Yes.<|return|>",
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
    "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    '<|constrain|>json<|message|>{"a": [1, "x"]}<|call|>',
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}"
    "<|call|>",
]

texts = st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), min_size=1, max_size=40).filter(
    lambda text: "<|" not in text
)
messages = st.one_of(
    st.tuples(st.sampled_from(["analysis", "commentary", "final"]), st.none(), texts),
    st.tuples(
        st.just("commentary"),
        st.sampled_from(["functions.f", "functions.get_weather"]),
        st.dictionaries(texts, values(texts), max_size=3).map(lambda value: json.dumps(value, ensure_ascii=False)),
    ),
    st.tuples(st.just("analysis"), st.sampled_from(["browser.search", "python"]), texts),
)


@pytest.fixture(scope="module")
def encoding(tmp_path_factory: pytest.TempPathFactory) -> Any:
    spec = find_spec("litellm")
    if spec is None or spec.origin is None:
        pytest.skip("litellm, which has a copy of the vocabulary, is not installed")
    folder = tmp_path_factory.mktemp("encodings")
    shutil.copy(Path(spec.origin).parent / COPY, folder / VOCABULARY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
        return oracle.load_harmony_encoding(oracle.HarmonyEncodingName.HARMONY_GPT_OSS)


def read_by_oracle(encoding: Any, tokens: list[int]) -> tuple[ParsedOutput, list[tuple[str, str]], Any]:
    """Text and thinking, calls, and the oracle's state at the end."""
    stream = oracle.StreamableParser(encoding, role=oracle.Role.ASSISTANT)
    for token in tokens:
        stream.process(token)
    said = [(m.channel, m.recipient, "".join(part.text for part in m.content)) for m in stream.messages]
    if stream.state == oracle.StreamState.CONTENT:
        said.append((stream.current_channel, stream.current_recipient, stream.current_content))
    calls = [
        (recipient.removeprefix("functions."), text)
        for _, recipient, text in said
        if recipient and recipient.startswith("functions.")
    ]
    thinking = [
        text
        for channel, recipient, text in said
        if (channel == "analysis" and not recipient) or (recipient and not recipient.startswith("functions."))
    ]
    visible = [text for channel, recipient, text in said if channel != "analysis" and not recipient]
    return ParsedOutput("".join(visible), "".join(thinking)), calls, stream.state


def read_by_us(encoding: Any, tokens: list[int]) -> ParsedOutput:
    """Token by token, as far as tokens are text by themselves."""
    pieces, waiting = [], []
    for token in tokens:
        waiting.append(token)
        text = encoding.decode(waiting)
        if not text.endswith("\ufffd"):
            pieces.append(text)
            waiting = []
    return assemble(feed(make_parser("harmony", "harmony", prompt_text=HARMONY_PROMPT, tools=TOOLS), pieces))


def check(encoding: Any, tokens: list[int]) -> None:
    wanted, calls, _ = read_by_oracle(encoding, tokens)
    parsed = read_by_us(encoding, tokens)
    assert (parsed.text, parsed.reasoning) == (wanted.text, wanted.reasoning)
    assert [(call.name, call.arguments) for call in parsed.calls] == calls


@pytest.mark.parametrize("output", OUTPUTS)
def test_the_reference_reads_the_same(encoding: Any, output: str) -> None:
    check(encoding, encoding.encode(output, allowed_special="all"))


@settings(max_examples=60, deadline=None)
@given(turn=st.lists(messages, min_size=1, max_size=4), data=st.data())
def test_what_the_reference_writes_is_read_as_the_reference_reads_it(
    encoding: Any, turn: list[tuple[str, str | None, str]], data: st.DataObject
) -> None:
    tokens: list[int] = []
    for channel, recipient, text in turn:
        message = oracle.Message.from_role_and_content(oracle.Role.ASSISTANT, text).with_channel(channel)
        if recipient is not None:
            message = message.with_recipient(recipient).with_content_type("<|constrain|>json")
        tokens += encoding.render(message)
    begin = encoding.encode("<|start|>assistant", allowed_special="all")
    assert tokens[: len(begin)] == begin
    tokens = tokens[len(begin) :]
    check(encoding, tokens)
    # Cut short within a message; headers are cut short in test_channels.py.
    cut = tokens[: data.draw(st.integers(1, len(tokens)))]
    if read_by_oracle(encoding, cut)[2] == oracle.StreamState.CONTENT and "\ufffd" not in encoding.decode(cut):
        check(encoding, cut)
