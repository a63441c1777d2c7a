"""What the answer to a conversation must obey: the format of its text, the schemas of its calls, or both.

Thinking stays free: where a model may think first, the constraint begins after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from quire.parsers import grammar as parser_grammar
from quire.parsers.format import ReasoningFormat, Tool
from quire.parsers.registry import REASONING_FORMATS
from quire.parsers.stream import reasoning_is_open
from quire.server.conversation.formats import Formats
from quire.server.conversation.request import Conversation, OutputFormat
from quire.server.errors import addressed
from quire.structured.guidance import to_lark
from quire.structured.sources import make_source, relax_schema
from quire.types.structured import GrammarLimits, StructuredOutputsParams

# Strings, regular expressions and comments of a Lark grammar, which are left alone when a rule gets another name.
_NOT_NAMES = re.compile(r"""("(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|\bstart\b)""")


def grammar_of(
    formats: Formats, conversation: Conversation, tools: Sequence[Tool], prompt: str, limits: GrammarLimits
) -> OutputFormat | None:
    """The constraint for the whole output, thinking and calls included; None leaves it free."""
    wanted, choice = conversation.output_format, conversation.tool_choice
    can_call = bool(tools) and formats.tool is not None
    mode: parser_grammar.ToolChoice = "auto"
    if can_call and choice.mode in ("required", "named"):
        mode, wanted = "required" if choice.mode == "required" else "named", None
    held = [tool for tool in tools if mode != "auto" or tool.strict] if can_call else []
    if not held:
        if wanted is None:
            return None
        if not can_call and not _may_think(formats, prompt):
            return wanted
    if mode == "named":
        tools = held = [tool for tool in held if tool.name == choice.name]
    text = parser_grammar.grammar_for(
        formats.tool if can_call else None,
        _enforceable(conversation, tools, held, limits) if can_call else [],
        tool_choice=mode,
        parallel=conversation.parallel_tool_calls,
        reasoning_format=formats.reasoning,
        reasoning_open=reasoning_is_open(formats.reasoning, prompt, formats.special_tokens),
        special_tokens=formats.special_tokens,
        answer=None if wanted is None else _rules_of(wanted, limits),
    )
    return OutputFormat(StructuredOutputsParams(grammar=text), "tools" if wanted is None else wanted.where)


def _enforceable(
    conversation: Conversation, tools: Sequence[Tool], held: Sequence[Tool], limits: GrammarLimits
) -> list[Tool]:
    """The tools; those whose calls must obey their schemas have schemas that can be enforced.

    The schema of a strict tool is enforced as a whole or refused; of any other tool, what can be enforced.
    """
    where = {tool.name: f"{tool.where}.parameters" for tool in conversation.offered_tools}
    found = []
    for tool in tools:
        if tool in held and tool.parameters:
            params = StructuredOutputsParams(json=dict(tool.parameters))
            with addressed({"structured_outputs": where[tool.name]}):
                if not tool.strict:
                    params, _ = relax_schema(params, limits)
                source = make_source(params, limits)
            tool = Tool(tool.name, json.loads(source.text), tool.strict, tuple(tool.parameters))
        found.append(tool)
    return found


def _may_think(formats: Formats, prompt: str) -> bool:
    """Whether thinking may come before the answer: the model knows how to, and the prompt has not ended it."""
    if formats.reasoning is None:
        return False
    layout = REASONING_FORMATS.get(formats.reasoning)
    if not isinstance(layout, ReasoningFormat):
        return True
    written = prompt.rstrip()
    return not any(written.endswith(end.strip()) for end in layout.end)


def _rules_of(wanted: OutputFormat, limits: GrammarLimits) -> str:
    """A constraint as Lark rules that begin with one named `answer`."""
    with addressed({"structured_outputs": wanted.where}):
        text = to_lark(make_source(wanted.constraint, limits))
    lines = [line for line in text.splitlines() if not line.startswith("%llguidance")]
    return _NOT_NAMES.sub(lambda found: "answer" if found[0] == "start" else found[0], "\n".join(lines)) + "\n"
