"""Turns pydantic's errors into one sentence: which field of a body is wrong and what it should be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

# Clearer words for some of pydantic's.
_WORDS = {
    "dict_type": "an object",
    "list_type": "a list",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_type": "a string",
}
_SHOULD_BE = "Input should be "


def explain_validation(errors: Sequence[Any]) -> tuple[str, str | None]:
    """Return (message, field) for the first wrong field. A union has an error for each of its members."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return f"the body is not valid JSON at character {first['loc'][-1]}: {first['ctx']['error']}", None
    before = _before_union(first["loc"])
    siblings = [first] if before is None else [e for e in errors if e["loc"][: len(before)] == before]
    nearest = max(siblings, key=_fit)
    field = _field_name(nearest["loc"])
    if not field:
        return "the body must be a JSON object sent with `Content-Type: application/json`", None
    if nearest["type"] == "missing":
        return f"{field} is missing; give it", field
    if nearest["type"] == "extra_forbidden":
        return f"{field} is not known here; leave it out", field
    value = repr(nearest.get("input"))
    shown = value if len(value) <= 60 else value[:57] + "..."
    return (
        f"{field} is {shown}, which is wrong: {_demands(e for e in siblings if _field_name(e['loc']) == field)}",
        field,
    )


def _demands(errors: Iterable[Any]) -> str:
    """What a field should be, where the members of a union expect different things."""
    texts = dict.fromkeys(_SHOULD_BE + _WORDS[e["type"]] if e["type"] in _WORDS else str(e["msg"]) for e in errors)
    first, *rest = texts
    return " or ".join([first[0].lower() + first[1:], *(text.removeprefix(_SHOULD_BE) for text in rest)])


def _fit(error: Any) -> tuple[bool, int, int]:
    """How well a value fits a union's member: the deeper in the value the member's error is, the better."""
    fields = [part for part in error["loc"] if not _is_member(part)]
    last = fields[-1] if fields else 0
    return error["type"] != "missing", len(fields), last if isinstance(last, int) else 0


def _before_union(path: tuple[int | str, ...]) -> tuple[int | str, ...] | None:
    """The part of a location before its outermost union, None if there is no union."""
    return next((path[:index] for index, part in enumerate(path) if _is_member(part)), None)


def _is_member(part: int | str) -> bool:
    """Whether this part of a location names a union's member, such as list[str], and not a field."""
    return isinstance(part, str) and (not part.isidentifier() or part[0].isupper() or part in ("str", "int", "float"))


def _field_name(path: Sequence[int | str]) -> str:
    """messages[0].content from pydantic's location."""
    name = ""
    for part in path:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part != "body" and not _is_member(part):
            name += f".{part}" if name else part
    return name
