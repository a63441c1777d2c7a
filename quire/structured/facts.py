"""Facts about the values of a JSON schema: their types, all values, or that two schemas have none in common.

Every answer is on the safe side: "not known" where it takes more than a look. Knows JSON Schema; knows no grammar.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.structured.instance import TYPES, CheckText, NotCheckedError, Validator, resolve, same, tuple_of, type_of

_ALL = frozenset(TYPES)
_MAX_DEPTH = 16  # of references and combinations that are looked into
_MAX_VALUES = 64
_BUDGET = 100_000  # parts that are looked at before everything is "not known"
_BOUNDS = (
    ("number", "minimum", "maximum"),
    ("string", "minLength", "maxLength"),
    ("array", "minItems", "maxItems"),
    ("object", "minProperties", "maxProperties"),
)


class Facts:
    """About the parts of one schema, `root`, which references point into."""

    def __init__(self, root: Any, check_text: CheckText) -> None:
        self._root = root
        self._check_text = check_text
        self._left = _BUDGET

    def _gives_up(self, depth: int) -> bool:
        self._left -= 1
        return depth > _MAX_DEPTH or self._left < 0

    def target(self, schema: Any) -> Any:
        """What a reference points to, True if that is not known."""
        try:
            return resolve(self._root, schema["$ref"])
        except NotCheckedError:
            return True

    def is_valid(self, schema: Any, value: Any) -> bool | None:
        """None if that is not known."""
        validator = Validator(self._root, self._check_text, max(0, self._left))
        try:
            return validator.is_valid(schema, value)
        except NotCheckedError:
            return None
        finally:
            self._left -= validator.num_steps

    def types(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """The types that its values may have, of TYPES."""
        if isinstance(schema, bool):
            return _ALL if schema else frozenset()
        if self._gives_up(depth):
            return _ALL
        names = schema.get("type", TYPES)
        names = [names] if isinstance(names, str) else names
        found = frozenset("number" if name == "integer" else name for name in names)
        if "const" in schema:
            found &= {type_of(schema["const"])}
        if "enum" in schema:
            found &= {type_of(value) for value in schema["enum"]}
        if "$ref" in schema:
            found &= self.types(self.target(schema), depth + 1)
        for part in schema.get("allOf", ()):
            found &= self.types(part, depth + 1)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                found &= frozenset().union(*(self.types(part, depth + 1) for part in schema[keyword]))
        return found

    def values(self, schema: Any) -> list[Any] | None:
        """All its values, if they are few; None if not or not known."""
        candidates = self._candidates(schema, 0)
        if candidates is None:
            return None
        found: list[Any] = []
        for value in candidates:
            valid = self.is_valid(schema, value)
            if valid is None:
                return None
            if valid and not any(same(value, other) for other in found):
                found.append(value)
        return found

    def _candidates(self, schema: Any, depth: int) -> list[Any] | None:
        """Values among which are all of the schema's."""
        if isinstance(schema, bool) or self._gives_up(depth):
            return [] if schema is False else None
        if "const" in schema or "enum" in schema:
            values: list[Any] = [schema["const"]] if "const" in schema else schema["enum"]
            return values if len(values) <= _MAX_VALUES else None
        if "$ref" in schema:
            return self._candidates(self.target(schema), depth + 1)
        for part in schema.get("allOf", ()):
            found = self._candidates(part, depth + 1)
            if found is not None:
                return found
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return _joined([self._candidates(part, depth + 1) for part in schema[keyword]])
        names = schema.get("type", TYPES)
        return _joined([_values_of_type(name, schema) for name in ([names] if isinstance(names, str) else names)])

    def disjoint(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Whether surely no value obeys both."""
        if self._gives_up(depth):
            return False
        common = self.types(one) & self.types(other)
        if not common:
            return True
        for first, second in ((one, other), (other, one)):
            values = self.values(first)
            if values is not None and all(self.is_valid(second, value) is False for value in values):
                return True
            if isinstance(first, bool):
                continue
            if "$ref" in first and self.disjoint(self.target(first), second, depth + 1):
                return True
            if any(self.disjoint(part, second, depth + 1) for part in first.get("allOf", ())):
                return True
            for keyword in ("anyOf", "oneOf"):
                options = first.get(keyword)
                if options and all(self.disjoint(part, second, depth + 1) for part in options):
                    return True
        if isinstance(one, bool) or isinstance(other, bool) or len(common) > 1:
            return False
        return self._apart(one, other, next(iter(common)), depth)

    def _apart(self, one: Mapping[str, Any], other: Mapping[str, Any], kind: str, depth: int) -> bool:
        """Whether values of the one type that both have in common differ."""
        for name, least, most in _BOUNDS:
            if name == kind and any(
                first.get(least, 0) > second[most]
                for first, second in ((one, other), (other, one))
                if most in second and least in first
            ):
                return True
        if kind == "array":
            return any(
                self.disjoint(first, second, depth + 1)
                for index in range(max(one.get("minItems", 0), other.get("minItems", 0)))
                for first, second in [(_item(one, index), _item(other, index))]
            )
        if kind == "object":
            needed = {*one.get("required", ()), *other.get("required", ())}
            return any(
                self.disjoint(_property(one, name), _property(other, name), depth + 1) for name in sorted(needed)
            )
        return False


def _item(schema: Mapping[str, Any], index: int) -> Any:
    first, rest = tuple_of(schema)
    return first[index] if index < len(first) else rest


def _property(schema: Mapping[str, Any], name: str) -> Any:
    """A schema that the property's value obeys."""
    properties = schema.get("properties", {})
    if name in properties:
        return properties[name]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)


def _values_of_type(name: str, schema: Mapping[str, Any]) -> list[Any] | None:
    if name == "null":
        return [None]
    if name == "boolean":
        return [True, False]
    least, most = schema.get("minimum"), schema.get("maximum")
    if name == "integer" and isinstance(least, int) and isinstance(most, int) and most - least < _MAX_VALUES:
        return list(range(least, most + 1))
    return None


def _joined(lists: list[list[Any] | None]) -> list[Any] | None:
    values: list[Any] = []
    for one in lists:
        if one is None or len(values) + len(one) > _MAX_VALUES:
            return None
        values += one
    return values
