"""The text side of a model: its tokenizer, its chat templates, and the defaults it suggests for generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, TypeGuard
from weakref import WeakSet

import msgspec

from quire.config.engine import pinned_date
from quire.config.groups import ModelConfig
from quire.frontend.chat_template import ChatTemplate
from quire.frontend.template_process import TemplateProcesses
from quire.frontend.template_sandbox import SYSTEM_DATE, BudgetError, QuickBudget
from quire.frontend.tokenizer import Tokenizer, load_tokenizer
from quire.loader.config_schema import TokenId
from quire.loader.hub import ModelSource, resolve_model
from quire.loader.model_config import load_generation_config
from quire.parsers.detect import detect
from quire.types.errors import CheckpointError, ConfigError, RequestError
from quire.types.sampling import SamplingParams
from quire.utils.log import get_logger

logger = get_logger(__name__)

Message = Mapping[str, Any]


class GenerationConfig(msgspec.Struct):
    """The part of generation_config.json that is used here; vLLM takes the same fields as defaults."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    eos_token_id: TokenId | list[TokenId] | None = None


_MAX_COMPILED = 16  # a server's clients may each send their own template
_TAKEN_VARIABLES = frozenset(
    {"self", "messages", "tools", "add_generation_prompt", "continue_final_message", "budget"}
)


@dataclass(frozen=True)
class GenerationDefaults:
    """What the model suggests; empty where it suggests nothing."""

    params: SamplingParams = field(default_factory=SamplingParams)
    eos_token_ids: tuple[int, ...] = ()
    limits_tokens: bool = False
    """Whether max_tokens comes from the file and not from SamplingParams."""


class TextModel:
    """Tokenizer, chat templates and generation defaults of one model, whatever engine runs it."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        defaults: GenerationDefaults | None = None,
        chat_template: str | None = None,
        system_date: date | None = None,
    ) -> None:
        """`chat_template` is a template's text to use instead of the tokenizer's own.

        Templates that ask for the date get `system_date`, or today's if there is none.
        """
        self.tokenizer = tokenizer
        self.defaults = defaults or GenerationDefaults()
        self._chat_template = chat_template
        # What every template sees: special tokens, and the date, if it is pinned.
        self._constants = dict(tokenizer.special_tokens) if tokenizer else {}
        if system_date is not None:
            self._constants[SYSTEM_DATE] = system_date.isoformat()
        self.reasoning_format: str | None = detect(self._own_source(with_tools=True)).reasoning_format
        """The format of the model's thinking: what the chat template shows, or a server's settings."""
        self._compiled: dict[str, ChatTemplate] = {}
        self._seen_with_tools: WeakSet[ChatTemplate] = WeakSet()
        self._own_processes: TemplateProcesses | None = None
        self._foreign_processes: TemplateProcesses | None = None

    def isolate_templates(self) -> None:
        """From now on render callers' templates, and the model's own where it takes long, in processes of their own.

        For servers, whose callers are strangers: nothing that a template does then holds up this process. The model's
        own does not wait for strangers'.
        """
        if self._own_processes is None:
            self._own_processes, self._foreign_processes = TemplateProcesses(), TemplateProcesses()

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        may_wait: bool = True,
    ) -> str:
        """The text of a conversation. It holds its special tokens already: encode it without adding any.

        Unless it `may_wait`, BudgetError where it would have to wait for another process (see isolate_templates).
        """
        check_messages(messages)
        variables = chat_template_kwargs or {}
        check_variables(variables)
        arguments: dict[str, Any] = {
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **variables,
        }
        source = self._template_source(chat_template, tools)
        constants = self._constants
        if chat_template is not None and self._foreign_processes is not None:
            if not may_wait:
                raise BudgetError("a caller's template is rendered in a process of its own")
            return self._foreign_processes.render(source, constants, arguments)
        template = self._template(source)
        if tools and template not in self._seen_with_tools:
            self._seen_with_tools.add(template)
            if not template.reads("tools"):
                logger.warning("the chat template prints no tools: the model does not hear of those given")
        if self._own_processes is None:
            return template.render(**arguments)
        try:
            return template.render(**arguments, budget=QuickBudget())
        except BudgetError:
            if not may_wait:
                raise
            return self._own_processes.render(source, constants, arguments)

    def chat_params(self) -> SamplingParams:
        """Defaults for a conversation: an answer goes on until the model ends it."""
        if self.defaults.limits_tokens:
            return self.defaults.params
        return msgspec.structs.replace(self.defaults.params, max_tokens=None)

    def own_template(self, with_tools: bool) -> ChatTemplate | None:
        """The template that the model or the settings give for conversations with tools or without, if any."""
        source = self._own_source(with_tools)
        return None if source is None else self._template(source)

    def _own_source(self, with_tools: bool) -> str | None:
        if self._chat_template is not None or self.tokenizer is None:
            return self._chat_template
        named = self.tokenizer.chat_templates
        return (named.get("tool_use") if with_tools else None) or named.get("default")

    def _template_source(self, chat_template: str | None, tools: Sequence[Any] | None) -> str:
        source = chat_template or self._own_source(bool(tools))
        if source is None and self.tokenizer is None:
            raise RequestError("a chat needs a tokenizer, and there is none; give prompt_token_ids", "messages")
        if source is None:
            raise RequestError(
                "this model has no chat template; give chat_template, or use generate() with a plain prompt",
                "chat_template",
            )
        return source

    def _template(self, source: str) -> ChatTemplate:
        template = self._compiled.get(source)
        if template is None:
            if len(self._compiled) >= _MAX_COMPILED:
                self._compiled.clear()
            template = self._compiled[source] = ChatTemplate(source, self._constants)
        return template


def load_text_model(config: ModelConfig) -> TextModel:
    """Find and read the tokenizer, chat template and generation defaults that the settings name."""
    source = resolve_model(config.model, config.revision)
    tokenizer = None
    if not config.skip_tokenizer_init:
        tokenizer = load_tokenizer(source.path if config.tokenizer is None else resolve_model(config.tokenizer).path)
    given = None if config.chat_template is None else read_chat_template(config.chat_template)
    text = TextModel(tokenizer, load_generation_defaults(source), given, pinned_date(config))
    if given is not None:
        text.own_template(with_tools=False)  # compiled now: a mistake in it is not left for the first request
    return text


def load_generation_defaults(source: ModelSource) -> GenerationDefaults:
    """Read generation_config.json of a model folder, or what a GGUF file suggests instead of it."""
    path = source.path if source.kind == "gguf" else source.path / "generation_config.json"
    try:
        suggested = msgspec.convert(load_generation_config(source), GenerationConfig)
        given = {name: value for name, value in msgspec.structs.asdict(suggested).items() if value is not None}
        eos = given.pop("eos_token_id", ())
        if "max_new_tokens" in given:
            given["max_tokens"] = given.pop("max_new_tokens")
        params = SamplingParams(**given)
    except (msgspec.ValidationError, RequestError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}; correct, replace or remove it") from error
    eos_token_ids = (eos,) if isinstance(eos, int) else tuple(eos)
    return GenerationDefaults(params, eos_token_ids, limits_tokens="max_tokens" in given)


def read_chat_template(file_or_text: str) -> str:
    """The text of a template given as a file or as itself; text is recognized by its braces or line breaks."""
    if "{" in file_or_text or "\n" in file_or_text:
        return file_or_text
    path = Path(file_or_text).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"chat_template names the file {file_or_text!r}, which does not exist; give a Jinja file or text"
        )
    return path.read_text(encoding="utf-8")


def is_conversation(value: object) -> TypeGuard[Sequence[Message]]:
    """Whether this is a list of chat messages, as opposed to a prompt or a list of conversations."""
    return isinstance(value, Sequence) and len(value) > 0 and isinstance(value[0], Mapping)


def is_batch(value: object) -> TypeGuard[Sequence[Sequence[Message]]]:
    """Whether this is a list of conversations; what is neither that nor a conversation counts as one, a wrong one."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) and not is_conversation(value)


def check_messages(messages: Sequence[Message]) -> None:
    """A conversation is a list of messages, each with a role; the template looks at the rest."""
    example = '{"role": "user", "content": "Hello"}'
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(f"messages is {messages!r:.60} but must be a list of messages like {example}", "messages")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"messages[{index}] is {message!r:.60} but must be a dict with a role, like {example}", "messages"
            )


def check_variables(variables: Mapping[str, Any]) -> None:
    """Variables for a template have names, and none that is taken."""
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise RequestError(
            f"chat_template_kwargs is {variables!r:.60} but must be a dict of variables", "chat_template_kwargs"
        )
    taken = sorted(_TAKEN_VARIABLES & variables.keys())
    if taken:
        raise RequestError(
            f"chat_template_kwargs has {taken[0]!r}, which the request sets elsewhere; rename it",
            "chat_template_kwargs",
        )
