"""The formats in which the served model writes tool calls and thinking: settled once, from settings and template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.config.groups import ServerConfig
from quire.frontend.chat_template import ChatTemplate
from quire.frontend.text_model import TextModel
from quire.parsers.detect import detect
from quire.parsers.registry import REASONING_FORMATS, TOOL_FORMATS
from quire.types.errors import TokenizerError
from quire.utils.log import get_logger

logger = get_logger(__name__)

# For a model whose template prints no tools, Quire writes them into the prompt itself, in this format.
PLAIN_TOOL_FORMAT = "hermes"


@dataclass(frozen=True, slots=True)
class Formats:
    """Names of the formats, None where there is none, and what the chat template knows."""

    tool: str | None = None
    reasoning: str | None = None
    template_knows_tools: bool = True
    """Whether the template prints tools; if not, they are written into the system message."""
    template_knows_calls: bool = True
    """Whether the template prints calls and their results; if not, they are written into messages as text."""
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    """The tokenizer's special tokens, by their text."""


def resolve_formats(text: TextModel, settings: ServerConfig) -> Formats:
    """Look at the settings, then at the chat template, and say in the log what was chosen and why."""
    template = _template(text)
    knows_tools = template is None or template.reads("tools")
    knows_calls = template is None or knows_tools or "tool_calls" in template.source
    found = detect(None if template is None else template.source)
    tool, why = found.tool_format, found.why
    if template is not None and tool is None and not knows_calls:
        tool = PLAIN_TOOL_FORMAT
        why += f"; it prints no tools, so they are written into the messages for {PLAIN_TOOL_FORMAT}"
    tool = _chosen(settings.tool_call_parser, tool)
    reasoning = _chosen(settings.reasoning_parser, found.reasoning_format)
    for registry, name in ((TOOL_FORMATS, tool), (REASONING_FORMATS, reasoning)):
        if name is not None:
            registry.get(name)
    logger.info("tool calls are read as %s, thinking as %s", tool or "text", reasoning or "text")
    if "auto" in (settings.tool_call_parser, settings.reasoning_parser):
        logger.info("how formats were found: %s", why)
    text.reasoning_format = reasoning
    return Formats(tool, reasoning, knows_tools, knows_calls, _special_tokens(text))


def _chosen(setting: str, found: str | None) -> str | None:
    return {"auto": found, "none": None}.get(setting, setting)


def _template(text: TextModel) -> ChatTemplate | None:
    """The template, None if it is invalid: it is refused when a conversation is rendered; completions need none."""
    try:
        return text.own_template(with_tools=True)
    except TokenizerError as error:
        logger.warning("%s", error)
        return None


def _special_tokens(text: TextModel) -> dict[str, int]:
    if text.tokenizer is None:
        return {}
    added = text.tokenizer.backend.get_added_tokens_decoder()
    return {token.content: token_id for token_id, token in added.items() if token.special}
