"""Lets a model's own chat template write an assistant's turn, and cuts out what the model would have generated."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.frontend.chat_template import ChatTemplate
from quire.parsers.events import ParsedOutput, assemble
from quire.parsers.format import Tool
from quire.parsers.stream import make_parser

VARIABLE = "QUIRE_TEMPLATES"
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "What is the weather?"}
SENTINEL = "quire9reply"

TOOLS = (
    Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where"},
                "days": {"type": "integer", "description": "How many"},
                "scale": {"type": "number", "description": "A factor"},
                "detailed": {"type": "boolean", "description": "More of it"},
                "options": {"type": "object", "description": "Anything else"},
                "tags": {"type": "array", "description": "Words", "items": {"type": "string"}},
            },
            "required": ["city"],
        },
    ),
    Tool("get_time", {"type": "object", "properties": {}}),
)


def templates_folder() -> Path | None:
    folder = os.environ.get(VARIABLE)
    return Path(folder) if folder and Path(folder).is_dir() else None


@dataclass(frozen=True)
class Cut:
    """A rendered conversation, cut where the model would have taken over."""

    prompt: str
    output: str


def tool_schemas() -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": t.name, "description": "A tool", "parameters": dict(t.parameters)}}
        for t in TOOLS
    ]


def cut_turn(
    source: str, message: Mapping[str, Any], *, with_tools: bool = True, kwargs: Mapping[str, Any] | None = None
) -> Cut:
    """Render the message as the assistant's, and take off what the prompt has of it and what ends the turn."""
    template = ChatTemplate(source, NAMES)
    variables: dict[str, Any] = {"tools": tool_schemas() if with_tools else None, **(kwargs or {})}

    def render(messages: Sequence[Mapping[str, Any]], generation: bool = False) -> str:
        return template.render(messages, add_generation_prompt=generation, **variables)

    prompt = render([USER], generation=True)
    conversation = render([USER, {"role": "assistant", **message}])
    shared = _common_prefix(prompt, conversation)
    if "<" in shared and ">" not in shared[shared.rindex("<") :]:
        shared = shared[: shared.rindex("<")]  # not inside of a marker
    reply = render([USER, {"role": "assistant", "content": SENTINEL}])
    ending = reply[reply.rindex(SENTINEL) + len(SENTINEL) :]
    return Cut(shared, conversation[len(shared) :].removesuffix(ending))


def _common_prefix(one: str, other: str) -> str:
    length = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    return one[:length] if length is not None else min(one, other, key=len)


def parse(cut: Cut, tool_format: str | None, reasoning_format: str | None, pieces: int = 1) -> ParsedOutput:
    """Parse the output, given in pieces of so many characters; 0 stands for all at once."""
    parser = make_parser(tool_format, reasoning_format, prompt_text=cut.prompt, tools=TOOLS)
    step = pieces or max(1, len(cut.output))
    events = [event for at in range(0, len(cut.output), step) for event in parser.feed(cut.output[at : at + step])]
    return assemble(events + parser.finish())
