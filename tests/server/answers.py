"""Answers made up for property tests: any mix of thinking, text and calls, in any pieces; a look at SDK models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from pydantic import BaseModel

from quire.parsers.events import CallArguments, CallEnd, CallStart, Event, ReasoningDelta, TextDelta
from quire.server.conversation.blocks import BlockKind

NAMES = ("weather", "space__search", "loop__add")


@dataclass(frozen=True)
class Said:
    """What a model says in a row: thinking, text, or a call with its JSON."""

    kind: BlockKind
    pieces: tuple[str, ...]
    name: str = ""
    complete: bool = True

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def _said(kind: BlockKind) -> st.SearchStrategy[Said]:
    pieces = st.lists(st.text(max_size=5), max_size=4).map(tuple)
    if kind != "call":
        return st.builds(Said, st.just(kind), pieces)
    json_pieces = st.lists(st.sampled_from(['{"a": ', "1", "}", '"ö"', ""]), max_size=4).map(tuple)
    return st.builds(Said, st.just(kind), json_pieces, st.sampled_from(NAMES), st.booleans())


ANSWERS = st.lists(st.one_of(_said("text"), _said("reasoning"), _said("call")), max_size=6)


def events_of(answer: Sequence[Said]) -> list[Event]:
    """What a parser tells of the answer, piece by piece."""
    events: list[Event] = []
    index = -1
    for said in answer:
        if said.kind == "call":
            index += 1
            events.append(CallStart(index, said.name, f"call_{index}"))
            events += [CallArguments(index, piece) for piece in said.pieces]
            events.append(CallEnd(index, said.complete))
        else:
            make = TextDelta if said.kind == "text" else ReasoningDelta
            events += [make(piece) for piece in said.pieces]
    return events


def merged(answer: Sequence[Said]) -> list[tuple[BlockKind, str]]:
    """The blocks that are expected: neighbours of one kind are one, and white space alone is none."""
    blocks: list[tuple[BlockKind, str]] = []
    last: BlockKind | None = None
    for said in answer:
        if said.kind != "call" and not said.text:
            continue
        if said.kind != "call" and last == said.kind:
            blocks[-1] = (said.kind, blocks[-1][1] + said.text)
        else:
            blocks.append((said.kind, said.text))
        last = said.kind
    return [(kind, text) for kind, text in blocks if kind == "call" or text.strip()]


def unknown_fields(value: Any, path: str = "") -> set[str]:
    """The fields that an SDK's models do not know, anywhere in a validated object."""
    if isinstance(value, BaseModel):
        inner = {name: getattr(value, name) for name in type(value).model_fields}
        found = {f"{type(value).__name__}.{name}" for name in value.model_extra or ()}
        return found.union(*(unknown_fields(part, name) for name, part in inner.items()))
    if isinstance(value, list):
        return set().union(*(unknown_fields(part, path) for part in value)) if value else set()
    return set()
