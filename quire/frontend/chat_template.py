"""Turns a conversation into a prompt with the model's own Jinja template; knows messages, not tokens.

Message content may be a string or a list of parts. Templates differ in which they accept, and nothing in a
template says so, so each is asked once, with a small conversation per role, in which form text comes through.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import jinja2
import jinja2.meta

from quire.frontend.template_sandbox import (
    Budget,
    BudgetError,
    QuickBudget,
    RaisedByTemplateError,
    SandboxEnvironment,
    render_within,
)
from quire.types.errors import RequestError, TokenizerError

_PROBE = "quire7probe"
# Appended to the message to be continued, to find where it ends in the prompt. The space at the end shows
# whether the template trims.
_CONTINUE_MARK = "quire7continues "
_MAX_DEPTH = 256  # of lists and objects that a template is given
_MAX_ROLES = 64  # clients choose their names, so the number that is remembered is bounded
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


@functools.cache
def _environment() -> SandboxEnvironment:
    return SandboxEnvironment()


class ChatTemplate:
    """One compiled template. Rendering is a pure function of the arguments, but for the date unless it is pinned."""

    def __init__(self, source: str, constants: Mapping[str, str] | None = None) -> None:
        """`constants` are variables of every rendering: special tokens, and perhaps SYSTEM_DATE."""
        self.source = source
        self._constants: dict[str, Any] = dict(constants or {})
        self._takes_parts: dict[str, bool] = {}
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(
                f"the chat template is not valid Jinja at line {error.lineno}: {error.message}; "
                "correct it, or give another with chat_template"
            ) from error
        except RecursionError as error:
            raise TokenizerError("the chat template is nested too deeply; give another with chat_template") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        budget: Budget | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for a conversation. A QuickBudget that is spent is raised as a BudgetError.

        `continue_final_message` ends the prompt inside the last message, for the model to go on with it;
        it excludes `add_generation_prompt`. `kwargs` are variables for the template.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other; "
                "set add_generation_prompt to false to continue the last message",
                field="continue_final_message",
            )
        budget = budget or Budget()
        chat = self._prepared(messages, budget)
        continued = _mark_final_message(chat) if continue_final_message else ""
        variables = {
            "tools": _plain(tools, "tools"),
            "documents": _plain(documents, "documents"),
            **_plain(kwargs, "chat_template_kwargs"),
            "messages": chat,
            "add_generation_prompt": add_generation_prompt,
        }
        prompt = self._run(variables, budget)
        return _cut_at_mark(prompt, continued) if continue_final_message else prompt

    def reads(self, variable: str) -> bool:
        """Whether the template asks for a variable, such as `tools`."""
        return variable in jinja2.meta.find_undeclared_variables(_environment().parse(self.source))

    def _run(self, variables: dict[str, Any], budget: Budget) -> str:
        try:
            return render_within(self._template, {**self._constants, **variables}, budget)
        except RaisedByTemplateError as error:
            raise RequestError(
                f"the chat template refused the messages: {error.message}", field="messages"
            ) from error
        except jinja2.exceptions.SecurityError as error:
            raise TokenizerError(
                f"the chat template does something unsafe at line {_line(error.__traceback__)}: {error.message}; "
                "give another with chat_template"
            ) from error
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            MemoryError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            if isinstance(error, BudgetError) and isinstance(budget, QuickBudget):
                raise
            # Whatever an expression in a template can raise when a conversation is not what it expects.
            raise RequestError(
                f"the chat template cannot render these messages, line {_line(error.__traceback__)}: {error}; "
                "check roles and contents, or give another template with chat_template",
                field="messages",
            ) from error

    def _prepared(self, messages: Sequence[Mapping[str, Any]], budget: Budget) -> list[dict[str, Any]]:
        """Copies the template may not change, with reasoning under every usual name and content in its form."""
        if not messages:
            raise RequestError("messages is empty; give at least one message", field="messages")
        chat: list[dict[str, Any]] = []
        for message in messages:
            if not isinstance(message, Mapping):
                raise RequestError(
                    f"a message is a {type(message).__name__}; give objects with role and content", field="messages"
                )
            copy = _with_reasoning_names(_plain(message, "messages"))
            content = copy.get("content")
            if isinstance(content, list) and not self._accepts_parts(str(copy.get("role")), budget):
                copy["content"] = _flattened(content)
            chat.append(copy)
        return chat

    def _accepts_parts(self, role: str, budget: Budget) -> bool:
        """Whether text in a list of parts reaches the prompt as text; asked once for each role."""
        known = self._takes_parts.get(role)
        if known is None:
            known = self._probe(role, budget)
            if len(self._takes_parts) < _MAX_ROLES:
                self._takes_parts[role] = known
        return known

    def _probe(self, role: str, budget: Budget) -> bool:
        message = {"role": role, "content": [{"type": "text", "text": _PROBE}]}
        user = {"role": "user", "content": "hello"}
        call = {"id": "000000000", "type": "function", "function": {"name": "f", "arguments": {}}}
        conversations: dict[str, list[dict[str, Any]]] = {
            "user": [message],
            "assistant": [user, message],
            "tool": [
                user,
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {**message, "tool_call_id": "000000000", "name": "f"},
            ],
        }
        chat = conversations.get(role, [message, user])
        variables = {"messages": chat, "tools": None, "documents": None, "add_generation_prompt": False}
        try:
            prompt = self._run(variables, budget)
        except (RequestError, TokenizerError):
            return False
        # A template that expects a string prints the list as Python or JSON would.
        return _PROBE in prompt and "'text'" not in prompt and '"text"' not in prompt


def _line(traceback: TracebackType | None) -> str:
    """jinja2 gives its frames the template's line numbers; the innermost one is where it went wrong."""
    line = "unknown"
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = str(traceback.tb_lineno)
        traceback = traceback.tb_next
    return line


def _plain(value: Any, field: str, depth: int = 0) -> Any:
    """A copy in JSON's types only: what a template sees has no methods that could do harm."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth > _MAX_DEPTH:
        raise RequestError(f"{field} is nested more than {_MAX_DEPTH} levels deep; give flatter values", field=field)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, field, depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
        return [_plain(item, field, depth + 1) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    raise RequestError(
        f"{field} holds a {type(value).__name__}, which a chat template cannot use; give JSON values", field=field
    )


def _with_reasoning_names(message: dict[str, Any]) -> dict[str, Any]:
    """Templates read a message's reasoning as `reasoning_content` or `thinking`; clients also say `reasoning`."""
    reasoning = next((message[name] for name in _REASONING_NAMES if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _flattened(parts: list[Any]) -> str:
    """The text of a list of parts, one line per part, for a template that takes strings only."""
    texts = []
    for part in parts:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(
                f"this model's chat template takes text only, but a message has a part of type {kind!r}; remove it",
                field="messages",
            )
        texts.append(text)
    return "\n".join(texts)


def _mark_final_message(chat: list[dict[str, Any]]) -> str:
    """Append the mark to the last text of the last message, and return that text."""
    content = chat[-1].get("content")
    if isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUE_MARK
        return content
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] = text + _CONTINUE_MARK
            return text
    raise RequestError(
        "continue_final_message is set, but the last message has no text to continue; give it a content",
        field="continue_final_message",
    )


def _cut_at_mark(prompt: str, continued: str) -> str:
    at = prompt.rfind(_CONTINUE_MARK.strip())
    if at < 0 or continued.strip() not in prompt:
        raise RequestError(
            "continue_final_message is set, but the chat template leaves the last message out or changes it; "
            "end the conversation with a message the template prints in full",
            field="continue_final_message",
        )
    trims = not prompt.startswith(_CONTINUE_MARK, at)
    return prompt[:at].rstrip() if trims else prompt[:at]
