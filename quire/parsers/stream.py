"""Makes the parser of one output: text goes in as it is generated, events come out.

However the text is cut into pieces, the events join to the same reply. What is not well-formed becomes text.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Collection, Sequence

from quire.parsers.bare_calls import BareCallParser
from quire.parsers.base import OutputParser, PlainParser
from quire.parsers.channels import ChannelParser
from quire.parsers.format import ChannelFormat, ReasoningFormat, Tool, ToolFormat
from quire.parsers.json_calls import JsonEnvelope
from quire.parsers.machine import TagParser
from quire.parsers.registry import REASONING_FORMATS, TOOL_FORMATS

__all__ = ["OutputParser", "make_parser", "needs_special_tokens", "new_call_id", "reasoning_is_open"]

# Where a turn ends in the templates of models that think, for callers that do not give the special tokens.
_TURN_MARK = re.compile(r"<[|\uff5c]|[|\uff5c]>|\[/?[A-Z_]+\]|\]~b\]|\[e~\[|</?s>|<(?:start|end)_of_")


def needs_special_tokens(
    tool_format: str | None, reasoning_format: str | None, special_tokens: Collection[str] = ()
) -> bool:
    """Whether the output must be detokenized with skip_special_tokens=False to be parsed.

    Models of one family differ in which markers are special tokens; give the tokenizer's to be sure.
    """
    chosen = [layout for layout in (_tool_format(tool_format), _reasoning_format(reasoning_format)) if layout]
    spelled = {marker.strip() for layout in chosen for marker in layout.markers}
    return any(layout.special for layout in chosen) or not spelled.isdisjoint(special_tokens)


def make_parser(
    tool_format: str | None,
    reasoning_format: str | None,
    *,
    prompt_text: str,
    tools: Sequence[Tool] = (),
    parse_tools: bool = True,
    parse_reasoning: bool = True,
    bare_calls: bool = True,
    special_tokens: Collection[str] = (),
) -> OutputParser:
    """The parser for one output.

    `prompt_text` is the rendered prompt or its tail with special tokens spelled out: it says whether thinking is
    open. `special_tokens` are the tokenizer's: where the formats need skip_special_tokens off, those that mean
    nothing to them are dropped. Without `parse_tools` calls stay in the text, and thinking without `parse_reasoning`.
    With `bare_calls` an answer that is nothing but calls as JSON objects has calls, though their markers are missing.
    """
    tool, reasoning = _tool_format(tool_format), _reasoning_format(reasoning_format)
    dropped = special_tokens if needs_special_tokens(tool_format, reasoning_format, special_tokens) else ()
    known = {item.name: item for item in tools}
    channels = next((layout for layout in (tool, reasoning) if isinstance(layout, ChannelFormat)), None)
    if channels is not None:
        # Channels are tool and reasoning format in one: only they separate text from headers.
        return ChannelParser(
            channels,
            prompt_text=prompt_text,
            tools=known,
            parse_tools=parse_tools and tool is not None,
            parse_reasoning=parse_reasoning and reasoning is not None,
            dropped=dropped,
        )
    tags = tool if parse_tools and isinstance(tool, ToolFormat) else None
    thoughts = reasoning if parse_reasoning and isinstance(reasoning, ReasoningFormat) else None
    if tags is None and thoughts is None and not dropped:
        return PlainParser()
    thinking = thoughts is not None and _ends_inside(thoughts, prompt_text, special_tokens)
    has_thought = thoughts is not None and prompt_text.rstrip().endswith(tuple(end.strip() for end in thoughts.end))
    parser = TagParser(tags, thoughts, tools=known, thinking=thinking, trims=has_thought, dropped=dropped)
    if tags is None or not (bare_calls and known) or (tags.bare and isinstance(tags.codec, JsonEnvelope)):
        return parser
    return BareCallParser(parser, known)


def reasoning_is_open(reasoning_format: str | None, prompt_text: str, special_tokens: Collection[str] = ()) -> bool:
    """Whether the prompt ends inside a block of thinking, so that the output begins in it."""
    reasoning = _reasoning_format(reasoning_format)
    return isinstance(reasoning, ReasoningFormat) and _ends_inside(reasoning, prompt_text, special_tokens)


def _ends_inside(reasoning: ReasoningFormat, prompt: str, special_tokens: Collection[str]) -> bool:
    """The last beginning of a block has no end, and the turn that it stands in is the last."""
    begin = max(((prompt.rfind(mark.strip()), len(mark.strip())) for mark in reasoning.begin), default=(-1, 0))
    if begin[0] < 0:
        return False
    tail = prompt[sum(begin) :]
    if not tail.strip():
        return True
    if any(mark.strip() in tail for mark in reasoning.end):
        return False
    # Text follows: thinking to be continued, unless the marker is only mentioned in an earlier turn.
    if special_tokens:
        return not any(token in tail for token in special_tokens)
    return _TURN_MARK.search(tail) is None


def new_call_id(tool_format: str | None, name: str, index: int) -> str:
    """An id for a call that came without one, of the form that the model's chat template accepts."""
    tool = _tool_format(tool_format)
    style = "openai" if tool is None else tool.id_style
    if style == "kimi":
        return f"functions.{name}:{index}"
    letters = string.ascii_letters + string.digits
    random_part = "".join(secrets.choice(letters) for _ in range(9 if style == "mistral" else 24))
    return random_part if style == "mistral" else f"call_{random_part}"


def _tool_format(name: str | None) -> ToolFormat | ChannelFormat | None:
    return None if name is None else TOOL_FORMATS.get(name)


def _reasoning_format(name: str | None) -> ReasoningFormat | ChannelFormat | None:
    return None if name is None else REASONING_FORMATS.get(name)
