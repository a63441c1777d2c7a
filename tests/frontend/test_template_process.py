"""Templates in processes of their own: the same prompts and errors, and an end to those that never end."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from quire.frontend import template_sandbox
from quire.frontend.chat_template import ChatTemplate
from quire.frontend.template_process import TemplateProcesses
from quire.frontend.text_model import TextModel
from quire.types.errors import RequestError, TokenizerError
from tests.frontend.fake_client import CHAT_TEMPLATE, TOKENIZER

MESSAGES = [{"role": "user", "content": "Hi \ud800 \u4e16"}]
ARGUMENTS = {"messages": MESSAGES, "tools": None, "add_generation_prompt": True}
SLOW = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def processes() -> Iterator[TemplateProcesses]:
    made = TemplateProcesses(max_seconds=20)
    yield made
    made.close()


def test_the_prompt_is_that_of_this_process(processes: TemplateProcesses) -> None:
    here = ChatTemplate(CHAT_TEMPLATE, {"bos_token": "<s>"}).render(**ARGUMENTS)
    for _ in range(2):
        assert processes.render(CHAT_TEMPLATE, {"bos_token": "<s>"}, ARGUMENTS) == here


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ("{% if %}", TokenizerError, "not valid Jinja"),
        ("{{ raise_exception('no roles here') }}", RequestError, "no roles here"),
        ("{{ messages.no.such }}", RequestError, "cannot render these messages"),
        ("{{ 9 ** 99999 }}", RequestError, "integer of more than 4096 bits"),
        ("{{ ''.__class__.mro() }}", TokenizerError, "unsafe"),
    ],
)
def test_errors_are_those_of_this_process(
    processes: TemplateProcesses, source: str, error: type[Exception], words: str
) -> None:
    for render in (
        lambda: ChatTemplate(source).render(**ARGUMENTS),
        lambda: processes.render(source, {}, ARGUMENTS),
    ):
        with pytest.raises(error, match=words):
            render()


def test_a_late_process_is_killed_and_replaced() -> None:
    processes = TemplateProcesses(max_seconds=0.3, max_processes=1)
    endless = "{% set x = 'a' * 200000 %}" + "{% set y = x|urlize|length %}" * 200 + SLOW
    for _ in range(2):
        begin = time.monotonic()
        with pytest.raises(RequestError, match=r"ran for more than"):
            processes.render(endless, {}, ARGUMENTS)
        assert time.monotonic() - begin < 15
    processes.close()


def test_a_process_has_no_more_memory_than_its_limit(processes: TemplateProcesses) -> None:
    kept = "{% set n = namespace(x=()) %}" + "".join(f"{{% set a{i} = 'x' * 31000000 ~ {i} %}}" for i in range(60))
    with pytest.raises((RequestError, TokenizerError)):
        processes.render(kept, {}, ARGUMENTS)
    assert processes.render("fine", {}, ARGUMENTS) == "fine"


def test_the_process_imports_only_what_rendering_needs() -> None:
    code = "import sys, quire.frontend.template_child; print(*sorted(m.partition('.')[0] for m in sys.modules))"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "tokenizers", "fastapi"} & set(modules)


class Spy(TemplateProcesses):
    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []

    def render(self, source: str, special_tokens: object, arguments: object) -> str:
        self.sources.append(source)
        return "elsewhere"


def isolated(template: str) -> tuple[TextModel, Spy, Spy]:
    text = TextModel(TOKENIZER, chat_template=template)
    text.isolate_templates()
    text._own_processes, text._foreign_processes = own, foreign = Spy(), Spy()
    return text, own, foreign


def test_the_models_own_template_is_rendered_here_while_it_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "_QUICK_SECONDS", 1.0)  # on a machine of any speed
    text, own, foreign = isolated(CHAT_TEMPLATE)
    assert text.render_chat([{"role": "user", "content": "Hi"}]) == "[user]Hi\n[assistant]"
    assert own.sources == foreign.sources == []


def test_what_is_slow_or_not_the_models_own_is_rendered_elsewhere() -> None:
    text, own, foreign = isolated(SLOW)
    assert text.render_chat(MESSAGES) == "elsewhere"
    assert own.sources == [SLOW]
    assert text.render_chat(MESSAGES, chat_template=CHAT_TEMPLATE) == "elsewhere"
    assert foreign.sources == [CHAT_TEMPLATE]
    for template in (None, CHAT_TEMPLATE):
        with pytest.raises(template_sandbox.BudgetError):
            text.render_chat(MESSAGES, chat_template=template, may_wait=False)


def test_without_isolation_everything_is_rendered_here() -> None:
    text = TextModel(TOKENIZER)
    assert text.render_chat([{"role": "user", "content": "Hi"}], chat_template="own") == "own"
