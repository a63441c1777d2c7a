"""Chat templates: equal to transformers on every real template at hand, and safe on hostile ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from quire.frontend.chat_template import ChatTemplate
from quire.types.errors import RequestError, TokenizerError

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather <now> & "here" in 東京',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "A city"},
                "unit": {"type": "string", "enum": ["C", "F"], "description": "C or F"},
                "days": {"type": "array", "items": {"type": "integer"}, "description": "which"},
            },
            "required": ["city"],
        },
        "return": {"type": "string"},
    },
}
CALL = {
    "id": "call12345",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, 2]}},
}
SYSTEM = {"role": "system", "content": "You are brief. "}
USER = {"role": "user", "content": " What is 2+2?\nÄ"}
ASSISTANT = {"role": "assistant", "content": "4"}
CALLER = {"role": "assistant", "content": "", "tool_calls": [CALL]}
STRING_CALL = {**CALL, "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
TOOL = {"role": "tool", "content": '{"t": 21}', "tool_call_id": "call12345", "name": "get_weather"}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ASSISTANT, {"role": "user", "content": "And 3+3?"}],
    "answered": [USER, ASSISTANT],
    "reasoning": [USER, {**ASSISTANT, "reasoning": "two and two"}, USER],
    "think-tags": [USER, {"role": "assistant", "content": "<think>hm</think>\n\n4"}, USER],
    "tool": [USER, CALLER, TOOL],
    "tool-then-answer": [SYSTEM, USER, CALLER, TOOL, {"role": "assistant", "content": "21 degrees"}, USER],
    "string-arguments": [USER, {**CALLER, "tool_calls": [STRING_CALL]}, TOOL],
    "two-calls": [USER, {**CALLER, "tool_calls": [CALL, CALL]}, TOOL, TOOL],
    "no-content": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, TOOL],
    "developer": [{"role": "developer", "content": "Be kind."}, USER],
    "wrong-order": [ASSISTANT, USER, USER],
    "unknown-role": [{"role": "narrator", "content": "Once"}],
}


def template_files() -> list[Path]:
    folder = os.environ.get("QUIRE_TEMPLATES")
    return sorted(Path(folder).glob("*.jinja")) if folder else []


def by_transformers(source: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    try:
        rendered, _ = render_jinja_template([messages], chat_template=source, **SPECIAL_TOKENS, **options)
    except Exception:  # the oracle: whatever it raises, ours must raise too
        return None
    return str(rendered[0])


def by_quire(template: ChatTemplate, messages: list[dict[str, Any]], **options: Any) -> str | None:
    try:
        return template.render(messages, **options)
    except (RequestError, TokenizerError):
        return None


@pytest.mark.skipif(not template_files(), reason="QUIRE_TEMPLATES does not name a folder of chat templates")
@pytest.mark.parametrize("file", template_files(), ids=lambda file: file.stem)
def test_real_templates_render_as_transformers_renders_them(file: Path) -> None:
    source = file.read_text(encoding="utf-8")
    template = ChatTemplate(source, SPECIAL_TOKENS)
    rendered = 0
    for name, messages in CONVERSATIONS.items():
        for tools in (None, [WEATHER]):
            for add_generation_prompt in (True, False):
                options: dict[str, Any] = {"tools": tools, "add_generation_prompt": add_generation_prompt}
                expected = by_transformers(source, messages, **options)
                actual = by_quire(template, messages, **options)
                assert actual == expected, f"{name}, {options}"
                rendered += expected is not None
        options = {"add_generation_prompt": False, "continue_final_message": True}
        assert by_quire(template, messages, **options) == by_transformers(source, messages, **options), name
    for variables in ({"enable_thinking": False}, {"functions": "[]", "datetime": "today", "documents": []}):
        expected = by_transformers(source, [SYSTEM, USER], add_generation_prompt=True, **variables)
        assert by_quire(template, [SYSTEM, USER], **variables) == expected
        rendered += expected is not None
    assert rendered > 0, "no conversation came through, so nothing was compared"


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% else %}<image>{% endif %}{% endfor %}{% endif %};{% endfor %}"
)


def test_filters_and_functions_mean_what_templates_expect() -> None:
    source = (
        "{{ v|tojson }}|{{ v|tojson(indent=1) }}|{{ v|tojson(sort_keys=True, separators=(',', ':')) }}"
        "|{% generation %}{{ 'g' ~ 1 ~ none }}{% endgeneration %}|{{ missing }}|{{ bos_token }}"
        "|{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}"
        "{{ i }}{{ loop.last }}{{ loop.length }}{% endfor %}|{{ strftime_now('%%') }}"
    )
    value = {"b": "<é>", "a": [1]}
    expected = by_transformers(source, [USER], v=value, add_generation_prompt=True)
    assert expected is not None
    assert ChatTemplate(source, SPECIAL_TOKENS).render([USER], v=value) == expected
    assert "é" in expected


def test_raise_exception_reaches_the_caller_with_its_message() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        template.render([USER])
    assert caught.value.field == "messages"


def test_a_syntax_error_names_its_line() -> None:
    with pytest.raises(TokenizerError, match="line 3"):
        ChatTemplate("a\n\n{% if %}")


def test_a_failing_expression_names_its_line() -> None:
    with pytest.raises(RequestError, match=r"line 2.*no attribute"):
        ChatTemplate("{{ 1 }}\n{{ messages[0].nothing.at_all }}").render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_refuses(source: str) -> None:
    with pytest.raises((RequestError, TokenizerError)):
        ChatTemplate(source).render([USER])


def test_the_caller_keeps_its_messages() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}], "reasoning": "r"}
    ChatTemplate(CHATML).render([message], add_generation_prompt=False, continue_final_message=True)
    assert message == {"role": "user", "content": [{"type": "text", "text": "a"}], "reasoning": "r"}


def test_parts_become_a_string_only_where_the_template_takes_strings() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    image = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "u"}}]
    assert ChatTemplate(CHATML).render([{"role": "user", "content": parts}]) == (
        "<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ChatTemplate(PARTS).render([{"role": "user", "content": parts}]) == "onetwo;"
    assert ChatTemplate(PARTS).render([{"role": "user", "content": image}]) == "see<image>;"
    with pytest.raises(RequestError, match="image_url"):
        ChatTemplate(CHATML).render([{"role": "user", "content": image}])


def test_parts_are_decided_for_each_role() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ '[' + m.content + ']' }}"
        "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "x"}]
    messages = [{"role": "system", "content": parts}, {"role": "user", "content": parts}]
    assert ChatTemplate(source).render(messages) == "[x]x"


@pytest.mark.parametrize("content", ["The answer is", "spaced ", [{"type": "text", "text": "part"}]])
@pytest.mark.parametrize("source", [CHATML, CHATML.replace("m['content']", "m['content']|trim"), PARTS])
def test_continue_final_message_ends_inside_it(source: str, content: Any) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    prompt = ChatTemplate(source).render(messages, **options)
    text = content if isinstance(content, str) else content[0]["text"]
    assert prompt.endswith(text) or prompt.endswith(text.rstrip())
    if isinstance(content, str):
        assert prompt == by_transformers(source, messages, **options)


def test_continue_final_message_refuses_what_it_cannot_do() -> None:
    with pytest.raises(RequestError, match="add_generation_prompt"):
        ChatTemplate(CHATML).render([USER], continue_final_message=True)
    with pytest.raises(RequestError, match="leaves the last message out"):
        ChatTemplate("fixed, content ignored").render(
            [USER], add_generation_prompt=False, continue_final_message=True
        )
    with pytest.raises(RequestError, match="no text to continue"):
        ChatTemplate(CHATML).render([{"role": "assistant"}], add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize("messages", [[], ["hello"], [{"role": "user", "content": b"bytes"}]])
def test_messages_that_are_none_are_refused(messages: list[Any]) -> None:
    with pytest.raises(RequestError):
        ChatTemplate(CHATML).render(messages)
