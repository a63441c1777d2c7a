"""Strategies and small functions that the tests of the parsers share."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

from hypothesis import strategies as st

from quire.parsers.base import OutputParser
from quire.parsers.events import CallArguments, CallEnd, Event, ReasoningDelta, TextDelta
from quire.parsers.format import ChannelFormat, Tool, ToolFormat
from quire.parsers.generate import Turn
from quire.parsers.registry import REASONING_FORMATS, TOOL_FORMATS
from quire.parsers.stream import make_parser
from quire.parsers.xml_calls import TaggedArguments

# Every tool format, with the reasoning format of a model that uses it.
PAIRS = (
    ("hermes", "qwen3"),
    ("qwen3_coder", "qwen3"),
    ("llama3_json", "deepseek_r1"),
    ("llama4_pythonic", "deepseek_r1"),
    ("pythonic", "deepseek_r1"),
    ("mistral", "magistral"),
    ("mistral_old", "magistral"),
    ("deepseek_v3", "deepseek_r1"),
    ("deepseek_v31", "deepseek_r1"),
    ("deepseek_v32", "deepseek_r1"),
    ("deepseek_v4", "deepseek_r1"),
    ("glm45", "glm45"),
    ("kimi_k2", "deepseek_r1"),
    ("granite", "granite"),
    ("phi4_mini", "qwen3"),
    ("minimax_m1", "deepseek_r1"),
    ("minimax_m2", "minimax_m2"),
    ("step3p5", "step3p5"),
    ("harmony", "harmony"),
)
HARMONY_PROMPT = "<|start|>user<|message|>hi<|end|><|start|>assistant"


def prompt_for(reasoning_format: str, is_open: bool) -> str:
    layout = REASONING_FORMATS.get(reasoning_format)
    if isinstance(layout, ChannelFormat):
        return HARMONY_PROMPT
    return "<|user|>hi<|assistant|>" + (layout.begin[0] if is_open else "")


def markers(tool_format: str, reasoning_format: str) -> list[str]:
    """Every string that means something to one of the two."""
    found: list[str] = []
    for layout in (TOOL_FORMATS.get(tool_format), REASONING_FORMATS.get(reasoning_format)):
        found += layout.markers
        if isinstance(layout, ChannelFormat):
            found += ["analysis", "commentary", "final", " to=functions.get_weather", "assistant"]
    return list(dict.fromkeys(marker for marker in found if marker.strip()))


def feed(parser: OutputParser, pieces: Iterable[str]) -> list[Event]:
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.finish()


def cuts(text: str, seed: int, count: int) -> Iterator[list[str]]:
    """The text in pieces: single characters first, then in so many other ways, of short and of long pieces."""
    yield list(text)
    random = Random(seed)
    for longest in itertools.islice(itertools.cycle((3, 7, 14, 40)), count - 1):
        pieces, at = [], 0
        while at < len(text):
            length = random.randint(1, longest)
            pieces.append(text[at : at + length])
            at += length
        yield pieces


def raw_text(events: Iterable[Event]) -> str:
    """Everything that the events say, calls included."""
    parts = []
    for event in events:
        if isinstance(event, (TextDelta, ReasoningDelta)):
            parts.append(event.text)
        elif isinstance(event, CallArguments):
            parts.append(event.json_fragment)
        elif not isinstance(event, CallEnd):
            parts.append(event.name)
    return "".join(parts)


SEEDS = st.integers(0, 2**32)
NAMES = ("get_weather", "f", "a_b-c.d2")
TEXTS = st.text(
    alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from("<>[]{}|=\"'\\ \n/`,:;()")), max_size=30
)
SCALARS = (
    st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.floats(allow_nan=False, allow_infinity=False)
)


def values(texts: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    keys = st.text(max_size=8)
    return st.recursive(
        SCALARS | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=6,
    )


def with_markers(marks: Sequence[str]) -> st.SearchStrategy[str]:
    """Text with markers in it, whole and in part."""
    parts = [*marks, *marks, *(mark[:end] for mark in marks for end in {1, len(mark) // 2, len(mark) - 1} if end > 0)]
    return st.lists(TEXTS | st.sampled_from(parts), max_size=4).map("".join)


def plain_texts(tool_format: str, reasoning_format: str) -> st.SearchStrategy[str]:
    """Text that is nothing but text in these formats, however much it looks like markers."""
    marks = [mark.strip() for mark in markers(tool_format, reasoning_format)]
    layout = TOOL_FORMATS.get(tool_format)
    bare = (layout.opening or "{") if isinstance(layout, ToolFormat) and layout.bare else "\0"

    def is_plain(text: str) -> bool:
        starts_call = any(line.strip().startswith(bare) for line in text.splitlines())
        return not any(mark in text for mark in marks) and not starts_call and "\ufffd" not in text

    return with_markers(marks).map(str.strip).filter(is_plain)


@st.composite
def turns(draw: st.DrawFn, tool_format: str, reasoning_format: str) -> Turn:
    """What a model may want to say. Arguments hold anything that the format can write."""
    texts = plain_texts(tool_format, reasoning_format)
    layout = TOOL_FORMATS.get(tool_format)
    argument_texts = with_markers(markers(tool_format, reasoning_format))
    if isinstance(layout, ToolFormat) and isinstance(layout.codec, TaggedArguments):
        end = layout.codec.value_end.strip()
        top = argument_texts.filter(lambda text: end not in text)
    else:
        top = argument_texts
    keys = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
    arguments = st.dictionaries(
        keys, top | values(argument_texts).filter(lambda v: not isinstance(v, str)), max_size=4
    )
    calls = draw(st.lists(st.tuples(st.sampled_from(NAMES), arguments), max_size=3))
    return Turn(text=draw(texts), reasoning=draw(texts), calls=calls)


def schema_of(value: Any) -> dict[str, Any]:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
    return {"type": kinds.get(type(value), "null")}


def tools_for(turn: Turn) -> list[Tool]:
    """Tools whose schemas allow what the turn's calls say; of arguments of several types, any of them."""
    properties: dict[str, dict[str, list[dict[str, Any]]]] = {name: {} for name in NAMES}
    for name, arguments in turn.calls:
        for key, value in arguments.items():
            properties[name].setdefault(key, []).append(schema_of(value))
    return [
        Tool(name, {"type": "object", "properties": {key: _any_of(kinds) for key, kinds in keys.items()}})
        for name, keys in properties.items()
    ]


def _any_of(schemas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    distinct = {json.dumps(schema): schema for schema in schemas}
    return dict(schemas[0]) if len(distinct) == 1 else {"anyOf": list(distinct.values())}


def parser_for(
    tool_format: str | None, reasoning_format: str, tools: Sequence[Tool] = (), is_open: bool = False, **kwargs: Any
) -> OutputParser:
    return make_parser(
        tool_format, reasoning_format, prompt_text=prompt_for(reasoning_format, is_open), tools=tools, **kwargs
    )
