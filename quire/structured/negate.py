"""The complement of a JSON schema, as a schema of keywords that a grammar can be made of.

A complement may leave out values that belong to it, never the other way round: what obeys it breaks the schema.
Knows JSON Schema; knows no grammar.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.structured.facts import Facts
from quire.structured.instance import TYPES, tuple_of, type_of

MAX_POSITIONS = 8  # of an array, at which an item is looked for
_MAX_DEPTH = 16
_BUDGET = 5_000  # conditions that are looked at
_MAX_LETTERS = 400  # of texts that a text must not be
_MAX_OPTIONS = 4  # of a oneOf

Say = Callable[[Any], Any]


class CannotSayError(Exception):
    """No automaton, or only one that is too large, can say this."""


class Negator:
    """`say` makes a schema of one that may have keywords which have to be rewritten."""

    def __init__(self, facts: Facts, say: Say) -> None:
        self._facts = facts
        self._say = say
        self._left = _BUDGET
        self.is_exact = True

    def spend(self) -> None:
        """Count a step; CannotSayError if there were too many, as conditions within conditions multiply."""
        self._left -= 1
        if self._left < 0:
            raise CannotSayError("there are too many conditions")

    def negate(self, schema: Any, depth: int = 0) -> Any:
        """What breaks the schema; CannotSayError if that is not known."""
        if isinstance(schema, bool):
            return not schema
        self.spend()
        if depth > _MAX_DEPTH:
            raise CannotSayError("it is nested too deep")
        options: list[Any] = []
        for keyword in schema:
            if keyword in _SILENT:
                continue
            method = _METHODS.get(keyword)
            if method is None:
                raise CannotSayError(f"nothing says the opposite of {keyword}")
            options += method(self, schema, depth + 1)
        return any_of(options)

    def _type(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        if "integer" in names and "number" not in names:
            self.is_exact = False  # numbers that are not whole cannot be told from those that are, such as 1.0
        left = [name for name in TYPES if name not in names and not (name == "number" and "integer" in names)]
        return [{"type": left}] if left else []

    def _enum(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        return without(schema["enum"])

    def _const(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        return without([schema["const"]])

    def _required(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        return [{"type": "object", "properties": {name: False}} for name in schema["required"]]

    def _properties(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        return [
            {"type": "object", "properties": {name: wrong}, "required": [name]}
            for name, part in schema["properties"].items()
            if (wrong := self.negate(part, depth)) is not False
        ]

    def _items(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        first, rest = tuple_of(schema)
        options = [item_at(index, self.negate(part, depth)) for index, part in enumerate(first)]
        wrong = self.negate(rest, depth)
        if wrong is not False:
            self.is_exact = False
            options += [item_at(len(first) + index, wrong) for index in range(MAX_POSITIONS)]
        return [{"type": "array", **option} for option in options if option is not False]

    def _prefix_items(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        return [] if "items" in schema else self._items(schema, depth)

    def _contains(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        if "minContains" in schema or "maxContains" in schema:
            raise CannotSayError("nothing says the opposite of minContains and maxContains")
        return [{"type": "array", "items": self.negate(schema["contains"], depth)}]

    def _min_properties(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        if schema["minProperties"] > 1:
            raise CannotSayError("nothing says the opposite of minProperties above 1")
        return [{"const": {}}] if schema["minProperties"] == 1 else []

    def _all_of(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        return [self.negate(part, depth) for part in schema["allOf"]]

    def _any_of(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        return [all_of([self.negate(part, depth) for part in schema["anyOf"]])]

    def _one_of(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        parts = schema["oneOf"]
        if len(parts) > _MAX_OPTIONS:
            raise CannotSayError("it has too many alternatives")
        both = [all_of([self._say(one), self._say(other)]) for one, other in itertools.combinations(parts, 2)]
        return [all_of([self.negate(part, depth) for part in parts]), *both]

    def _not(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        return [self._say(schema["not"])]

    def _if(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        return [
            all_of([self._say(schema["if"]), self.negate(schema.get("then", True), depth)]),
            all_of([self.negate(schema["if"], depth), self.negate(schema.get("else", True), depth)]),
        ]

    def _dependent_required(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        return [
            {"type": "object", "required": [name], "properties": {missing: False}}
            for name, needed in schema["dependentRequired"].items()
            for missing in needed
        ]

    def _reference(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        return [self.negate(self._facts.target(schema), depth)]

    def _neutral(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        if schema["additionalProperties"] not in (True, {}):
            raise CannotSayError("nothing says the opposite of additionalProperties")
        return []


Method = Callable[[Negator, Mapping[str, Any], int], list[Any]]


def _bound(keyword: str, kind: str, opposite: str, step: int) -> Method:
    """The opposite of a bound is a bound from the other side."""

    def negate(negator: Negator, schema: Mapping[str, Any], depth: int) -> list[Any]:
        bound = schema[keyword] + step
        return [] if kind != "number" and bound < 0 else [{"type": kind, opposite: bound}]

    return negate


DEFINITIONS = frozenset({"$defs", "definitions", "$schema", "$id", "$anchor"})
_SILENT = DEFINITIONS | {"then", "else", "minContains", "maxContains"}
_METHODS: dict[str, Method] = {
    "type": Negator._type,
    "enum": Negator._enum,
    "const": Negator._const,
    "required": Negator._required,
    "properties": Negator._properties,
    "additionalProperties": Negator._neutral,
    "items": Negator._items,
    "prefixItems": Negator._prefix_items,
    "contains": Negator._contains,
    "minProperties": Negator._min_properties,
    "allOf": Negator._all_of,
    "anyOf": Negator._any_of,
    "oneOf": Negator._one_of,
    "not": Negator._not,
    "if": Negator._if,
    "dependentRequired": Negator._dependent_required,
    "$ref": Negator._reference,
    "minimum": _bound("minimum", "number", "exclusiveMaximum", 0),
    "maximum": _bound("maximum", "number", "exclusiveMinimum", 0),
    "exclusiveMinimum": _bound("exclusiveMinimum", "number", "maximum", 0),
    "exclusiveMaximum": _bound("exclusiveMaximum", "number", "minimum", 0),
    "minLength": _bound("minLength", "string", "maxLength", -1),
    "maxLength": _bound("maxLength", "string", "minLength", 1),
    "minItems": _bound("minItems", "array", "maxItems", -1),
    "maxItems": _bound("maxItems", "array", "minItems", 1),
}


def any_of(options: Sequence[Any]) -> Any:
    """One of these, in the simplest form."""
    left = [option for option in options if option is not False]
    if any(option is True for option in left):
        return True
    return False if not left else left[0] if len(left) == 1 else {"anyOf": left}


def all_of(parts: Sequence[Any]) -> Any:
    """All of these, in the simplest form."""
    left = [part for part in parts if part is not True and part != {}]
    if any(part is False for part in left):
        return False
    return True if not left else left[0] if len(left) == 1 else {"allOf": left}


def item_at(index: int, schema: Any) -> Any:
    """An array that has such an item there; says nothing of other types."""
    return False if schema is False else {"prefixItems": [*[True] * index, schema], "minItems": index + 1}


def without(values: Sequence[Any]) -> list[Any]:
    """Schemas of all that is none of these values."""
    by_type = {name: [value for value in values if type_of(value) == name] for name in TYPES}
    options: list[Any] = [{"type": name} for name in TYPES if not by_type[name]]
    options += [{"const": value} for value in (True, False) if by_type["boolean"] and value not in by_type["boolean"]]
    options += _between(sorted(set(by_type["number"])))
    if by_type["string"]:
        options.append({"type": "string", "pattern": pattern_without(by_type["string"])})
    for name, empty in (("array", "minItems"), ("object", "minProperties")):
        if any(by_type[name]):
            raise CannotSayError(f"nothing says that a value is another {name} than one that is not empty")
        if by_type[name]:
            options.append({"type": name, empty: 1})
    return options


def _between(numbers: Sequence[float]) -> list[Any]:
    """All numbers but these."""
    options = []
    for below, above in itertools.pairwise([None, *numbers, None] if numbers else []):
        option: dict[str, Any] = {"type": "number"}
        if below is not None:
            option["exclusiveMinimum"] = below
        if above is not None:
            option["exclusiveMaximum"] = above
        options.append(option)
    return options


def pattern_without(texts: Sequence[str]) -> str:
    """A regular expression for all texts but these: they leave the way to one of them somewhere, or end on it."""
    if sum(map(len, texts)) > _MAX_LETTERS:
        raise CannotSayError(f"the texts that are excluded have more than {_MAX_LETTERS} letters")
    following: dict[str, set[str]] = {}
    for text in texts:
        for end in range(len(text) + 1):
            letters = following.setdefault(text[:end], set())
            if end < len(text):
                letters.add(text[end])
    ways = []
    for begin, letters in sorted(following.items()):
        written = "".join(map(_letter, begin))
        leaves = f"[^{''.join(map(_letter, sorted(letters)))}]" if letters else "(?s:.)"
        ways.append(f"{written}{leaves}(?s:.*)")
        if begin not in texts:
            ways.append(written)
    return f"^(?:{'|'.join(ways)})$"


def _letter(letter: str) -> str:
    return letter if letter.isascii() and letter.isalnum() else f"\\x{{{ord(letter):x}}}"
