"""What a parser says about a stretch of output; the same events whether the output came at once or in pieces."""

from __future__ import annotations

import msgspec


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """More of the visible reply."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    """More of the model's thinking."""

    text: str


class CallStart(msgspec.Struct, frozen=True, gc=False):
    """A tool call begins. Indexes count from 0; `id` is set only if the model wrote one before the arguments."""

    index: int
    name: str
    id: str | None = None


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """More of a call's arguments. The fragments of a call join to a JSON object; each prefix is a prefix of JSON."""

    index: int
    json_fragment: str


class CallEnd(msgspec.Struct, frozen=True, gc=False):
    """A tool call is over. `complete` is false if the output ended or went wrong inside its arguments."""

    index: int
    complete: bool = True


Event = TextDelta | ReasoningDelta | CallStart | CallArguments | CallEnd
