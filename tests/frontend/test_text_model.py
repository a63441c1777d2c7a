from __future__ import annotations

import json
import logging
from datetime import date, datetime
from pathlib import Path
from typing import Any

import gguf
import pytest

from quire.config.engine import EngineConfig
from quire.frontend.text_model import (
    TextModel,
    is_conversation,
    load_generation_defaults,
    load_text_model,
    read_chat_template,
)
from quire.frontend.tokenizer import Tokenizer
from quire.loader.hub import ModelSource, resolve_model
from quire.types.errors import CheckpointError, ConfigError, RequestError
from quire.types.sampling import SamplingParams
from tests.frontend.fake_client import TOKENIZER, text_model

HELLO = [{"role": "user", "content": "Hello"}]


def write(folder: Path, value: Any) -> ModelSource:
    (folder / "generation_config.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return ModelSource(folder, "folder", "model")


def test_defaults_come_from_generation_config(tmp_path: Path) -> None:
    suggested = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "do_sample": True,
        "min_p": None,
        "eos_token_id": [1, 2],
    }
    defaults = load_generation_defaults(write(tmp_path, suggested))
    assert defaults.params == SamplingParams(temperature=0.6, top_p=0.9, top_k=20)
    assert defaults.eos_token_ids == (1, 2)
    assert not defaults.limits_tokens


def test_a_suggested_length_is_kept_for_chats(tmp_path: Path) -> None:
    defaults = load_generation_defaults(write(tmp_path, {"max_new_tokens": 99, "eos_token_id": 7}))
    assert (defaults.params.max_tokens, defaults.eos_token_ids) == (99, (7,))
    assert TextModel(TOKENIZER, defaults).chat_params().max_tokens == 99
    assert text_model().chat_params().max_tokens is None


def test_without_the_file_the_usual_defaults_hold(tmp_path: Path) -> None:
    assert load_generation_defaults(ModelSource(tmp_path, "folder", "model")).params == SamplingParams()


def test_what_the_authors_of_the_default_model_suggest_is_its_default() -> None:
    """Its file does not say it, and at temperature 1 so small a model rambles."""
    assert load_generation_defaults(resolve_model("smollm2")).params == SamplingParams(temperature=0.2, top_p=0.9)


def test_a_gguf_file_may_suggest_how_to_sample(tmp_path: Path) -> None:
    def suggesting(temperature: float) -> ModelSource:
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
        writer.add_float32("general.sampling.temp", temperature)
        writer.add_uint32("general.sampling.top_k", 20)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return resolve_model(str(tmp_path / "m.gguf"))

    assert load_generation_defaults(suggesting(0.6)).params == SamplingParams(temperature=0.6, top_k=20)
    with pytest.raises(CheckpointError, match=r"m\.gguf.*temperature"):
        load_generation_defaults(suggesting(-1.0))


@pytest.mark.parametrize(
    ("content", "named"),
    [("{", "not valid JSON"), ({"temperature": -1}, "temperature"), ([1], "object"), ({"top_p": "x"}, "top_p")],
)
def test_a_broken_file_is_named(tmp_path: Path, content: Any, named: str) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json") as refused:
        load_generation_defaults(write(tmp_path, content))
    assert named in str(refused.value)


def test_a_template_is_a_file_or_text(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("from a file")
    assert read_chat_template(str(file)) == "from a file"
    assert read_chat_template("{{ messages }}") == "{{ messages }}"
    with pytest.raises(ConfigError, match=r"missing\.jinja"):
        read_chat_template("missing.jinja")


def test_which_template_is_used() -> None:
    tokenizer = Tokenizer(TOKENIZER.backend, {}, (), {"default": "plain", "tool_use": "tools"})
    text = TextModel(tokenizer)
    assert text.render_chat(HELLO) == "plain"
    assert text.render_chat(HELLO, tools=[{"name": "f"}]) == "tools"
    assert text.render_chat(HELLO, chat_template="mine") == "mine"
    assert TextModel(tokenizer, chat_template="configured").render_chat(HELLO) == "configured"
    assert TextModel(None, chat_template="configured").render_chat(HELLO) == "configured"


def test_tools_that_the_template_does_not_print_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "quire")
    text = text_model()
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert text.render_chat(HELLO, tools=tools) == text.render_chat(HELLO, tools=tools) == text.render_chat(HELLO)
    assert caplog.messages == ["the chat template prints no tools: the model does not hear of those given"]
    text.render_chat(HELLO, tools=tools, chat_template="{{ tools }}")
    assert len(caplog.messages) == 1


def test_a_model_without_a_template_says_what_to_do() -> None:
    with pytest.raises(RequestError, match="generate"):
        TextModel(Tokenizer(TOKENIZER.backend)).render_chat(HELLO)
    with pytest.raises(RequestError, match="tokenizer"):
        TextModel(None).render_chat(HELLO)


def test_the_last_message_may_be_continued() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "I am"}]
    rendered = text_model().render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert rendered == "[user]Hello\n[assistant]I am"
    with pytest.raises(RequestError, match="add_generation_prompt"):
        text_model().render_chat(messages, continue_final_message=True)


def test_templates_of_many_clients_do_not_pile_up() -> None:
    text = text_model()
    for index in range(100):
        assert text.render_chat(HELLO, chat_template=f"template {index}") == f"template {index}"
    assert len(text._compiled) <= 16


@pytest.mark.parametrize(
    "messages", ["Hello", {"role": "user"}, 5, [], ["Hello"], [{"content": "Hello"}], [{"role": 1}]]
)
def test_bad_messages_are_refused(messages: Any) -> None:
    with pytest.raises(RequestError) as refused:
        text_model().render_chat(messages)
    assert refused.value.field == "messages"


def test_what_a_conversation_is() -> None:
    assert is_conversation(HELLO)
    for other in ("Hi", [], [1, 2], ["Hi"], [HELLO], {"role": "user"}):
        assert not is_conversation(other)


DATED = "{% macro today() %}{{ strftime_now('%d %b %Y, %H:%M') }}{% endmacro %}Today is {{ today() }}."


def test_a_pinned_date_is_what_templates_see() -> None:
    text = TextModel(TOKENIZER, chat_template=DATED, system_date=date(2026, 1, 31))
    assert text.render_chat(HELLO) == "Today is 31 Jan 2026, 00:00."
    assert text.render_chat(HELLO, chat_template="{{ strftime_now('%Y-%m-%d') }}") == "2026-01-31"
    own = f"{datetime.now():%Y}"
    assert own in TextModel(TOKENIZER, chat_template=DATED).render_chat(HELLO)


def test_the_date_comes_from_the_settings_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TOKENIZER.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")

    def rendered(**settings: Any) -> str:
        config = EngineConfig.from_flat(model=str(tmp_path), chat_template=DATED, **settings)
        return load_text_model(config.model).render_chat(HELLO)

    assert "01 Feb 2025" in rendered(system_date="2025-02-01")
    monkeypatch.setenv("QUIRE_SYSTEM_DATE", "2024-12-24")
    assert "24 Dec 2024" in rendered()
    assert "01 Feb 2025" in rendered(system_date="2025-02-01")
