"""Makes a conversation ready for the engine: its prompt, its sampling parameters with the grammar, and its reader."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from quire.frontend.reading import Reading
from quire.frontend.template_sandbox import BudgetError
from quire.parsers import format as parser_format
from quire.parsers.stream import needs_special_tokens, new_call_id
from quire.server.context import ServerContext
from quire.server.conversation.answer import AnswerReader, ChoiceReader
from quire.server.conversation.grammar import grammar_of
from quire.server.conversation.render import render
from quire.server.conversation.request import Conversation
from quire.server.conversation.schema_check import SchemaCheck, relax
from quire.types.errors import RequestError
from quire.types.sampling import SamplingParams

# Tools and long conversations are rendered on a thread, to keep the event loop free.
_LONG_CONVERSATION = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedConversation:
    """What to send to the engine and how to read what comes back."""

    prompt: str
    params: SamplingParams
    format_field: str | None
    """What the request calls the grammar in `params`, if there is one."""
    may_call: bool
    """Whether the answer may have calls."""
    reading: Reading
    """How the engine's text becomes events."""
    _schema_check: SchemaCheck | None

    def reader(self) -> AnswerReader:
        """Reads the outputs of one run of this conversation."""
        return AnswerReader(self._choice_reader)

    def _choice_reader(self) -> ChoiceReader:
        new_id = partial(new_call_id, self.reading.tool_format)
        return ChoiceReader(new_id, 1 if self.reading.one_call else None, self._schema_check)


async def prepare_conversation(
    context: ServerContext, conversation: Conversation, params: SamplingParams
) -> PreparedConversation:
    """Render the prompt and settle how the answer is constrained and read."""

    def prepare(may_wait: bool = True) -> PreparedConversation:
        return _prepare(context, conversation, params, may_wait)

    slow = bool(conversation.tools) or conversation.output_format is not None
    if conversation.template.chat_template is not None:
        return await context.template_threads.run(prepare)
    if not slow and size_of(conversation.messages) <= _LONG_CONVERSATION:
        with suppress(BudgetError):
            return prepare(may_wait=False)
    return await asyncio.to_thread(prepare)


async def render_conversation(context: ServerContext, conversation: Conversation) -> str:
    """The prompt alone."""

    def render_now() -> str:
        return render(context.text, context.formats, conversation)

    if conversation.template.chat_template is not None:
        return await context.template_threads.run(render_now)
    return await asyncio.to_thread(render_now)


async def num_tokens(context: ServerContext, prompt: str) -> int:
    """How long a rendered prompt is."""
    return len(await context.encode(prompt, False, "messages"))


def _prepare(
    context: ServerContext, conversation: Conversation, params: SamplingParams, may_wait: bool
) -> PreparedConversation:
    formats = context.formats
    tools = conversation.offered_tools
    if tools and formats.tool is None and conversation.tool_choice.mode != "auto":
        raise RequestError(
            "tool_choice asks for a call but this server reads none; start it with --tool-call-parser", "tool_choice"
        )
    may_call = bool(tools) and formats.tool is not None
    prompt = render(context.text, formats, conversation, may_wait=may_wait)
    parsed = tuple(parser_format.Tool(tool.name, tool.parameters or {}, tool.strict) for tool in tools)
    limits = context.provider.engine.info.grammar_limits
    conversation, schema_check = relax(conversation, limits)
    grammar = grammar_of(formats, conversation, parsed, prompt, limits)
    if grammar is not None:
        params = msgspec.structs.replace(params, structured_outputs=grammar.constraint)
    dropped: Collection[str] = ()
    tool = formats.tool if may_call else None
    if params.skip_special_tokens and needs_special_tokens(tool, formats.reasoning, formats.special_tokens):
        params = msgspec.structs.replace(params, skip_special_tokens=False)
        dropped = formats.special_tokens
    return PreparedConversation(
        prompt=prompt,
        params=params,
        format_field=None if grammar is None else grammar.where,
        may_call=may_call,
        reading=Reading(
            tool_format=formats.tool,
            reasoning_format=formats.reasoning,
            prompt_text=prompt,
            tools=parsed,
            parse_tools=may_call,
            # An answer that is held to a format of its own may well look like a call.
            bare_calls=conversation.output_format is None,
            special_tokens=dropped,
            one_call=may_call and not conversation.parallel_tool_calls,
        ),
        _schema_check=schema_check,
    )


def size_of(messages: Sequence[Mapping[str, Any]]) -> int:
    """How many characters of text there are."""
    return sum(
        len(content) if isinstance(content := message["content"], str) else sum(len(part["text"]) for part in content)
        for message in messages
    )
