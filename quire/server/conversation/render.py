"""Renders a conversation with the model's chat template; knows text, not tokens."""

from __future__ import annotations

from typing import Any

from quire.frontend.text_model import TextModel
from quire.server.conversation.formats import PLAIN_TOOL_FORMAT, Formats
from quire.server.conversation.plain import with_tools, without_tool_roles
from quire.server.conversation.request import Conversation
from quire.types.errors import RequestError, TokenizerError


def render(text: TextModel, formats: Formats, conversation: Conversation, *, may_wait: bool = True) -> str:
    """Render the prompt. Without `may_wait`, BudgetError if the template takes more than a few milliseconds."""
    options = conversation.template
    messages, tools = conversation.messages, conversation.offered_tools
    printed: list[dict[str, Any]] | None = [tool.as_function() for tool in tools] or None
    if not formats.template_knows_calls and options.chat_template is None:
        messages = without_tool_roles(messages)
    if not formats.template_knows_tools and options.chat_template is None and tools:
        messages = with_tools(messages, tools, explain_calls=formats.tool == PLAIN_TOOL_FORMAT)
        printed = None
    generates = options.add_generation_prompt
    try:
        return text.render_chat(
            messages,
            chat_template=options.chat_template,
            add_generation_prompt=not options.continue_final_message if generates is None else generates,
            continue_final_message=options.continue_final_message,
            tools=printed,
            chat_template_kwargs=template_variables(conversation),
            may_wait=may_wait,
        )
    except TokenizerError as error:
        if options.chat_template is None:
            raise
        raise RequestError(str(error), "chat_template") from error


def template_variables(conversation: Conversation) -> dict[str, Any]:
    """The template's variables besides messages and tools. Those that the client gives win."""
    variables: dict[str, Any] = {}
    effort, thinking = conversation.reasoning_effort, conversation.thinking
    if effort is not None and effort != "none":
        variables["reasoning_effort"] = effort
    if thinking is None and effort is not None:
        thinking = effort != "none"
    if thinking is not None:
        # The two names that templates have for it.
        variables |= {"enable_thinking": thinking, "thinking": thinking}
    options = conversation.template
    if options.documents is not None:
        variables["documents"] = options.documents
    return variables | dict(options.chat_template_kwargs)
