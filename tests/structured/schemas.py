"""Schemas with keywords that have to be rewritten, at random, and values that may obey them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

NAMES = ("a", "b", "c")  # in the order in which properties are generated
OTHERS = ("x", "yy")  # names that no schema lists

_CONSTANTS = st.sampled_from([None, True, False, 0, 1, 2, 1.5, "", "a", "ab", "b\n"])
_LENGTHS = st.integers(0, 2)
_NUMBERS = st.integers(-1, 3)


def _has(keyword: str, values: st.SearchStrategy[Any], **more: Any) -> st.SearchStrategy[Any]:
    return values.map(lambda value: {**more, keyword: value})


SCALARS = st.one_of(
    _has("const", _CONSTANTS),
    _has("enum", st.lists(_CONSTANTS, min_size=1, max_size=4)),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "string"], "maxLength": 1}]),
    _has("maxLength", _LENGTHS, type="string"),
    _has("minLength", _LENGTHS, type="string", maxLength=2),
    st.tuples(_NUMBERS, _NUMBERS).map(lambda b: {"type": "integer", "minimum": min(b), "maximum": max(b)}),
    st.just({"type": "number", "exclusiveMinimum": 0, "maximum": 2}),
)
_SIMPLE = st.one_of(
    SCALARS,
    _has("type", st.sampled_from(["null", "boolean", "string", "number", "object", "array"])),
    _has("minLength", _LENGTHS),
    _has("minimum", _NUMBERS),
    _has("maximum", _NUMBERS),
)
_PARTS = st.dictionaries(st.sampled_from(NAMES), _SIMPLE, min_size=1, max_size=2)
_NAME_LISTS = st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True)
_OF_OBJECTS = st.one_of(_has("required", _NAME_LISTS), _has("properties", _PARTS), _SIMPLE)
_OF_ARRAYS = st.one_of(_has("minItems", _LENGTHS), _has("maxItems", _LENGTHS), _has("contains", SCALARS), _SIMPLE)


def _combined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, min_size=1, max_size=2)
    return st.one_of(inner, _has("allOf", lists), _has("anyOf", lists), _has("not", inner))


@st.composite
def conditions(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    part = _combined(inner)
    match draw(st.integers(0, 3)):
        case 0:
            return {"not": draw(part)}
        case 1:
            return {"if": draw(part), "then": draw(part), **({"else": draw(part)} if draw(st.booleans()) else {})}
        case 2:
            return {"oneOf": draw(st.lists(inner, min_size=2, max_size=3))}
    return {}


@st.composite
def objects(draw: st.DrawFn) -> dict[str, Any]:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: draw(SCALARS) for name in NAMES},
        "required": draw(st.lists(st.sampled_from(NAMES), max_size=2, unique=True)),
    }
    if draw(st.booleans()):
        schema["additionalProperties"] = draw(st.sampled_from([False, {"type": "null"}]))
    more: list[dict[str, Any]] = [
        draw(conditions(_OF_OBJECTS)),
        {"dependentRequired": {draw(st.sampled_from(NAMES)): draw(_NAME_LISTS)}},
        {"dependentSchemas": {draw(st.sampled_from(NAMES)): draw(_OF_OBJECTS)}},
        {"minProperties": draw(st.integers(0, 3))},
        {"maxProperties": draw(st.integers(0, 3))},
        {"minProperties": draw(st.integers(0, 2)), "maxProperties": draw(st.integers(1, 4))},
        {"propertyNames": draw(st.sampled_from([
            {"enum": ["a", "c", "x"]}, {"pattern": "^[a-x]$"}, {"maxLength": 1}, {"not": {"const": "b"}}, False,
        ]))},
        {"unevaluatedProperties": False},
    ]  # fmt: skip
    for one in draw(st.lists(st.sampled_from(more), max_size=2)):
        schema |= one
    return schema


@st.composite
def arrays(draw: st.DrawFn) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "items": draw(SCALARS)}
    if draw(st.booleans()):
        schema["maxItems"] = draw(st.integers(0, 4))
    more: list[dict[str, Any]] = [
        draw(conditions(_OF_ARRAYS)),
        {"uniqueItems": True},
        {"contains": draw(SCALARS)},
        {"contains": draw(SCALARS), "minContains": draw(st.integers(0, 2)), "maxContains": draw(st.integers(1, 3))},
        {"minItems": draw(st.integers(0, 2))},
    ]
    for one in draw(st.lists(st.sampled_from(more), min_size=1, max_size=2)):
        schema |= one
    return schema


@st.composite
def scalars(draw: st.DrawFn) -> dict[str, Any]:
    return {**draw(SCALARS), **draw(conditions(_SIMPLE))}


def _nested(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema as one that a property refers to."""
    properties = {"p": {"$ref": "#/$defs/it"}}
    return {"$defs": {"it": schema}, "type": "object", "properties": properties, "required": ["p"]}


_NEGATED = _SIMPLE.map(lambda schema: {"$defs": {"it": schema}, "not": {"anyOf": [{"$ref": "#/$defs/it"}, BIG]}})
BIG = {"type": ["array", "object"]}
_ANY = st.one_of(objects(), objects(), arrays(), scalars())
SCHEMAS = st.one_of(_ANY, _ANY, _ANY.map(_nested), _NEGATED)

_VALUES = st.one_of(_CONSTANTS, st.sampled_from([-1, 3, "bb", 0.5]))


@st.composite
def _object_values(draw: st.DrawFn) -> dict[str, Any]:
    """Properties in the order of the schema, those that it does not name at the end."""
    names = [name for name in (*NAMES, *OTHERS) if draw(st.booleans())]
    return {name: draw(_VALUES if name in NAMES else st.none()) for name in names}


_PLAIN_VALUES = st.one_of(_object_values(), _object_values(), st.lists(_VALUES, max_size=3), _VALUES)
VALUES = st.one_of(_PLAIN_VALUES, _PLAIN_VALUES, _PLAIN_VALUES.map(lambda value: {"p": value}))
