"""The grammars of answers, compiled: what they let through and what they do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.parsers.format import Tool as ParserTool
from quire.server.conversation.formats import Formats
from quire.server.conversation.grammar import grammar_of
from quire.server.conversation.request import (
    AUTO,
    REQUIRED,
    Conversation,
    OutputFormat,
    Tool,
    ToolChoice,
)
from quire.structured.guidance import GuidanceBackend
from quire.structured.sources import make_source
from quire.types.errors import RequestError
from quire.types.structured import GrammarLimits, StructuredOutputsParams, Vocabulary
from tests.server.scripted import TEXT

assert TEXT.tokenizer is not None
TOKENIZER = TEXT.tokenizer
SPECIAL = {
    token.content: token_id
    for token_id, token in TOKENIZER.backend.get_added_tokens_decoder().items()
    if token.special
}
PLAIN = Formats("hermes", None, special_tokens=SPECIAL)
THINKS = Formats("hermes", "qwen3", special_tokens=SPECIAL)
HARMONY = Formats("harmony", "harmony", special_tokens=SPECIAL)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = (Tool("f", parameters=SCHEMA), Tool("g"))
JSON = OutputFormat(StructuredOutputsParams(json=SCHEMA), "response_format")
CALL_F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CALL_G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
BAD_F = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
TALK = Conversation(messages=[])


@pytest.fixture(scope="module")
def backend() -> GuidanceBackend:
    size = TOKENIZER.vocab_size
    eos = TOKENIZER.eos_token_id
    assert eos is not None
    return GuidanceBackend(
        Vocabulary(
            [TOKENIZER.token_bytes(token) for token in range(size)],
            [token for token in range(size) if TOKENIZER.is_special(token)],
            [eos],
        )
    )


def allows(backend: GuidanceBackend, formats: Formats, talk: Conversation, said: str, prompt: str = "") -> bool:
    """Whether the grammar of a conversation lets the model say exactly this."""
    tools = [ParserTool(tool.name, tool.parameters or {}, tool.strict) for tool in talk.offered_tools]
    grammar = grammar_of(formats, talk, tools, prompt, GrammarLimits())
    assert grammar is not None
    matcher = backend.compile(make_source(grammar.constraint)).matcher()
    ids = TOKENIZER.encode(said, add_special_tokens=False)
    assert TOKENIZER.eos_token_id is not None
    return matcher.accept(ids) and (matcher.is_complete or matcher.accept([TOKENIZER.eos_token_id]))


def test_required_and_named(backend: GuidanceBackend) -> None:
    required = replace(TALK, tools=TOOLS, tool_choice=REQUIRED)
    named = replace(required, tool_choice=ToolChoice("named", "f"))
    single = replace(required, parallel_tool_calls=False)
    for said, by_required, by_named, by_single in (
        (CALL_F, True, True, True),
        (CALL_G, True, False, True),
        (f"{CALL_F}\n{CALL_G}", True, False, False),
        (BAD_F, False, False, False),
        ("Hello", False, False, False),
        ("", False, False, False),
    ):
        assert allows(backend, PLAIN, required, said) == by_required, said
        assert allows(backend, PLAIN, named, said) == by_named, said
        assert allows(backend, PLAIN, single, said) == by_single, said


def test_strict_tools_are_held_to_where_the_model_is_free(backend: GuidanceBackend) -> None:
    talk = replace(TALK, tools=(replace(TOOLS[0], strict=True), TOOLS[1]))
    for said, allowed in ((CALL_F, True), (f"Well. {CALL_F}", True), (BAD_F, False), ("Hello", True), (CALL_G, True)):
        assert allows(backend, PLAIN, talk, said) == allowed, said


def test_thinking_comes_before_what_is_required(backend: GuidanceBackend) -> None:
    required = replace(TALK, tools=TOOLS, tool_choice=REQUIRED)
    assert allows(backend, THINKS, required, f"<think>\nHm.\n</think>\n\n{CALL_F}")
    assert allows(backend, THINKS, required, CALL_F)
    assert not allows(backend, THINKS, required, "<think>\nHm.\n</think>\n\nHello")
    opened = "<|im_start|>assistant\n<think>\n"
    assert allows(backend, THINKS, required, f"Hm.\n</think>\n\n{CALL_F}", opened)
    assert not allows(backend, THINKS, required, CALL_F, opened)


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        ({"json": SCHEMA}, '{"a": 1}', '{"a": "x"}'),
        ({"json_object": True}, '{"b": [1]}', "[1]"),
        ({"regex": "start/[0-9]+"}, "start/12", "answer/12"),
        ({"choice": ["start", "b/"]}, "start", "answer"),
        ({"grammar": 'start: "start" rest? // start here\nrest: /start[0-9]/ start?'}, "startstart1start", "answer"),
        (
            {
                "structural_tag": '{"format": {"type": "tag", "begin": "<a>", "content": '
                '{"type": "json_schema", "json_schema": {"type": "integer"}}, "end": "</a>"}}'
            },
            "<a>12</a>",
            "<a>x</a>",
        ),
    ],
)
def test_any_format_may_come_after_thinking(
    backend: GuidanceBackend, constraint: dict[str, Any], good: str, bad: str
) -> None:
    wanted = OutputFormat(StructuredOutputsParams(**constraint), "structured_outputs")
    talk = replace(TALK, output_format=wanted)
    begin, final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant", "<|channel|>final<|message|>"
    for said, allowed in ((good, True), (bad, False)):
        assert allows(backend, PLAIN, talk, said) == allowed
        assert allows(backend, THINKS, talk, said) == allowed
        assert allows(backend, THINKS, talk, f"<think>{bad}</think>\n\n{said}") == allowed
        assert allows(backend, THINKS, talk, f"{bad}</think>\n\n{said}", "<think>\n") == allowed
        assert allows(backend, THINKS, talk, said, "<think>\n\n</think>\n\n") == allowed
        assert allows(backend, HARMONY, talk, begin + final + said) == allowed
        assert allows(backend, HARMONY, talk, final + said) == allowed


def test_beside_tools_an_answer_is_calls_or_the_format(backend: GuidanceBackend) -> None:
    talk = replace(TALK, tools=TOOLS, output_format=JSON)
    for said, allowed in ((CALL_F, True), ('{"a": 1}', True), ("Hello", False), (f'{{"a": 1}}{CALL_F}', False)):
        assert allows(backend, PLAIN, talk, said) == allowed, said
    forced = replace(talk, tool_choice=REQUIRED)
    assert not allows(backend, PLAIN, forced, '{"a": 1}')
    call = ' to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"a": 1}<|call|>'
    assert allows(backend, HARMONY, talk, call)
    assert allows(backend, HARMONY, talk, '<|channel|>final<|message|>{"a": 1}')
    assert not allows(backend, HARMONY, talk, "<|channel|>final<|message|>Hello")


def test_free_answers_have_no_grammar() -> None:
    parsed = [ParserTool("f")]
    assert grammar_of(THINKS, replace(TALK, tools=TOOLS, tool_choice=AUTO), parsed, "", GrammarLimits()) is None
    assert grammar_of(THINKS, TALK, [], "", GrammarLimits()) is None
    # Where no calls are read, strictness of them means nothing.
    off = replace(THINKS, tool=None)
    strict = replace(TALK, tools=(replace(TOOLS[0], strict=True),))
    assert grammar_of(off, strict, parsed, "", GrammarLimits()) is None


def test_a_schema_is_refused_under_its_own_name() -> None:
    tool = Tool("f", parameters={"properties": {"a": {"type": "strin"}}}, where="tools[3].function")
    talk = replace(TALK, tools=(tool,), tool_choice=REQUIRED)
    with pytest.raises(RequestError, match=r"tools\[3\].function.parameters: type at #/properties/a/type") as refused:
        grammar_of(PLAIN, talk, [ParserTool("f", tool.parameters or {})], "", GrammarLimits())
    assert refused.value.field == "tools[3].function.parameters"
    format_ = OutputFormat(StructuredOutputsParams(json={"not": {"pattern": "a"}}), "text.format.schema")
    with pytest.raises(RequestError, match=r"text.format.schema: not at #/not") as refused:
        grammar_of(THINKS, replace(TALK, output_format=format_), [], "", GrammarLimits())
    assert refused.value.field == "text.format.schema"
