"""What the answer to a conversation must obey: the format of its text, the schemas of its calls, or both."""

from __future__ import annotations

from collections.abc import Sequence

from quire.parsers.format import Tool
from quire.server.conversation.formats import Formats
from quire.server.conversation.request import Conversation, OutputFormat


def grammar_of(
    formats: Formats, conversation: Conversation, tools: Sequence[Tool], prompt: str
) -> OutputFormat | None:
    """The constraint for the whole output, thinking and calls included; None leaves it free."""
    return conversation.output_format
