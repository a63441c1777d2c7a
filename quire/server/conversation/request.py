"""A conversation as every endpoint hands it over: messages in the templates' shape, tools, and what may come back."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.types.errors import RequestError
from quire.types.structured import StructuredOutputsParams

ToolMode = Literal["auto", "none", "required", "named"]

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call. `parameters` is a JSON schema of an object; None takes any object."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False
    """Whether calls must obey the schema even when the model decides by itself to make one."""
    where: str = "tools"
    """What the request calls this tool's schema; for errors."""

    def as_function(self) -> dict[str, Any]:
        """The form that chat templates print."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = {"type": "object", "properties": {}} if self.parameters is None else self.parameters
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may call tools (auto), may not (none), must (required), or must call the named one."""

    mode: ToolMode = "auto"
    name: str | None = None


AUTO = ToolChoice("auto")
NONE = ToolChoice("none")
REQUIRED = ToolChoice("required")


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """What the text of an answer must look like. `where` is what the request calls it; for errors."""

    constraint: StructuredOutputsParams
    where: str
    is_strict: bool = True
    """Whether a schema that cannot be enforced as a whole is refused; if not, the answer is checked afterwards."""


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """How a conversation becomes a prompt."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    documents: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a model is to answer. Messages have OpenAI's chat shape, with the arguments of calls as objects."""

    messages: Sequence[Mapping[str, Any]]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = AUTO
    parallel_tool_calls: bool = True
    """Whether an answer may have more than one call."""
    output_format: OutputFormat | None = None
    thinking: bool | None = None
    """Whether a model that can do both thinks first; None leaves it to the template."""
    reasoning_effort: str | None = None
    template: TemplateOptions = field(default_factory=TemplateOptions)

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """The tools that are shown to the model: none where it may call none."""
        return () if self.tool_choice.mode == "none" else self.tools


def text_of(item: Mapping[str, Any], name: str, where: str) -> str:
    """A field of a part of the request that has to be text; `where` is what the request calls that part."""
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} must be text; give it", f"{where}.{name}")
    return value


def is_tool_name(name: str) -> bool:
    """Whether every tool format can write this name."""
    return _TOOL_NAME.fullmatch(name) is not None


def check_tools(tools: Sequence[Tool], choice: ToolChoice, choice_field: str = "tool_choice") -> None:
    """Refuse names that not every format can write, duplicate names, and a choice of a tool that is not given."""
    seen: dict[str, Tool] = {}
    for tool in tools:
        if not is_tool_name(tool.name):
            raise RequestError(
                f"{tool.where} has the name {tool.name[:140]!r}; a tool's name has 1 to 128 letters, digits or any of"
                " _ - .",
                tool.where,
            )
        if tool.name in seen:
            raise RequestError(
                f"{tool.where} has the name {tool.name!r}, as {seen[tool.name].where} has; give each tool its own",
                tool.where,
            )
        seen[tool.name] = tool
        kind = None if tool.parameters is None else tool.parameters.get("type", "object")
        if kind not in (None, "object"):
            raise RequestError(
                f"{tool.where} has parameters of type {str(kind)[:40]!r}; a tool takes an object: use type 'object'",
                tool.where,
            )
    if choice.mode in ("required", "named") and not tools:
        raise RequestError(f"{choice_field} asks for a call but there are no tools; give tools", choice_field)
    if choice.mode == "named" and choice.name not in seen:
        raise RequestError(
            f"{choice_field} names the tool {str(choice.name)[:140]!r}, which is not in tools;"
            f" there are: {', '.join(seen)[:500]}",
            choice_field,
        )
