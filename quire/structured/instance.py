"""Whether a JSON value obeys a JSON schema, within a budget of work.

A general validator would run a stranger's regular expressions with backtracking and follow references for ever; this
one asks the backend about texts and counts its steps. Knows JSON Schema; knows no grammar.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from quire.structured.base import FORMATS

# Whether a text obeys a schema of `pattern` or `format` alone; None if that is not known.
CheckText = Callable[[Mapping[str, Any], str], bool | None]

TYPES = ("null", "boolean", "number", "string", "array", "object")
_BUDGET = 20_000  # parts of schemas and values that are looked at, about 20 ms
_MAX_DEPTH = 100  # of values and references: a few calls each


class NotCheckedError(Exception):
    """The value cannot be judged: the schema uses what is not understood, or it takes too long."""


class InvalidError(Exception):
    """The value breaks `keyword` of the schema that holds for the part of it at `path`."""

    def __init__(self, keyword: str, path: str) -> None:
        super().__init__(f"{keyword} is broken at {path}")


def type_of(value: Any) -> str:
    """One of TYPES."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def is_of_type(value: Any, name: str) -> bool:
    """Whether a value is of a type that a schema may name, "integer" included."""
    kind = type_of(value)
    return kind == name or (name == "integer" and kind == "number" and (isinstance(value, int) or value.is_integer()))


def same(one: Any, other: Any) -> bool:
    """Equality as JSON has it: 1 is 1.0, and true is no number."""
    if type_of(one) != type_of(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(part, other[name]) for name, part in one.items())
    return bool(one == other)


def resolve(root: Any, reference: str) -> Any:
    """What a reference into the schema points to; NotCheckedError if it does not."""
    target = root
    if reference == "#":
        return target
    if not reference.startswith("#/"):
        raise NotCheckedError(f"the reference {reference!r:.60} is not understood")
    for part in reference[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
            target = target[int(name)]
        elif isinstance(target, dict) and name in target:
            target = target[name]
        else:
            raise NotCheckedError(f"the reference {reference!r:.60} leads nowhere")
    return target


class Validator:
    """Judges values by the parts of one schema, `root`, which references point into."""

    def __init__(self, root: Any, check_text: CheckText, budget: int = _BUDGET) -> None:
        self._root = root
        self._check_text = check_text
        self._budget = budget
        self.num_steps = 0

    def is_valid(self, schema: Any, value: Any) -> bool:
        """NotCheckedError if that cannot be decided."""
        try:
            self.check(schema, value)
        except InvalidError:
            return False
        return True

    def check(self, schema: Any, value: Any, path: str = "#", depth: int = 0) -> None:
        """InvalidError if the value breaks the schema, NotCheckedError if that cannot be decided."""
        self._spend(1)
        if depth > _MAX_DEPTH:
            raise NotCheckedError("it is nested too deep")
        if schema is True:
            return
        if schema is False:
            raise InvalidError("false", path)
        self._spend(len(schema))
        reference = schema.get("$ref")
        if reference is not None:
            self.check(resolve(self._root, reference), value, path, depth + 1)
        self._check_values(schema, value, path)
        self._check_combined(schema, value, path, depth + 1)
        if isinstance(value, list):
            self._check_array(schema, value, path, depth + 1)
        elif isinstance(value, dict):
            self._check_object(schema, value, path, depth + 1)

    def _spend(self, steps: int) -> None:
        self.num_steps += steps
        if self.num_steps > self._budget:
            raise NotCheckedError("it takes too long")

    def _holds(self, schema: Any, value: Any, path: str, depth: int) -> bool:
        try:
            self.check(schema, value, path, depth)
        except InvalidError:
            return False
        return True

    def _check_values(self, schema: Mapping[str, Any], value: Any, path: str) -> None:
        for keyword in ("$dynamicRef", "$recursiveRef", "unevaluatedProperties", "unevaluatedItems"):
            if keyword in schema:
                raise NotCheckedError(f"{keyword} is not understood")
        names = schema.get("type", TYPES)
        if not any(is_of_type(value, name) for name in ([names] if isinstance(names, str) else names)):
            raise InvalidError("type", path)
        if "enum" in schema:
            self._spend(len(schema["enum"]))
            if not any(same(value, one) for one in schema["enum"]):
                raise InvalidError("enum", path)
        if "const" in schema and not same(value, schema["const"]):
            raise InvalidError("const", path)
        kind = type_of(value)
        if kind == "number":
            _check_number(schema, value, path)
        elif kind == "string":
            _check_count(schema, len(value), "minLength", "maxLength", path)
            if "pattern" in schema:
                self._check_string("pattern", schema["pattern"], value, path)
            if schema.get("format") in FORMATS:
                self._check_string("format", schema["format"], value, path)

    def _check_string(self, keyword: str, rule: Any, text: str, path: str) -> None:
        self._spend(len(text) + 1_000)
        answer = self._check_text({keyword: rule}, text)
        if answer is None:
            raise NotCheckedError(f"{keyword} {rule!r:.60} is not understood")
        if not answer:
            raise InvalidError(keyword, path)

    def _check_combined(self, schema: Mapping[str, Any], value: Any, path: str, depth: int) -> None:
        for part in schema.get("allOf", ()):
            self.check(part, value, path, depth)
        if "anyOf" in schema and not any(self._holds(part, value, path, depth) for part in schema["anyOf"]):
            raise InvalidError("anyOf", path)
        if "oneOf" in schema and sum(self._holds(part, value, path, depth) for part in schema["oneOf"]) != 1:
            raise InvalidError("oneOf", path)
        if "not" in schema and self._holds(schema["not"], value, path, depth):
            raise InvalidError("not", path)
        if "if" in schema:
            branch = "then" if self._holds(schema["if"], value, path, depth) else "else"
            self.check(schema.get(branch, True), value, path, depth)

    def _check_array(self, schema: Mapping[str, Any], values: list[Any], path: str, depth: int) -> None:
        _check_count(schema, len(values), "minItems", "maxItems", path)
        first, rest = tuple_of(schema)
        for index, value in enumerate(values):
            self.check(first[index] if index < len(first) else rest, value, f"{path}/{index}", depth)
        if schema.get("uniqueItems"):
            self._spend(len(values) ** 2)
            if any(same(one, other) for index, one in enumerate(values) for other in values[:index]):
                raise InvalidError("uniqueItems", path)
        if "contains" in schema:
            found = sum(self._holds(schema["contains"], value, path, depth) for value in values)
            if not schema.get("minContains", 1) <= found <= schema.get("maxContains", found):
                raise InvalidError("contains", path)

    def _check_object(self, schema: Mapping[str, Any], values: dict[str, Any], path: str, depth: int) -> None:
        _check_count(schema, len(values), "minProperties", "maxProperties", path)
        if any(name not in values for name in schema.get("required", ())):
            raise InvalidError("required", path)
        properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        for name, value in values.items():
            here = f"{path}/{name.replace('~', '~0').replace('/', '~1')}"
            parts = [properties[name]] if name in properties else []
            parts += [part for pattern, part in patterns.items() if self._name_matches(pattern, name)]
            for part in parts or [schema.get("additionalProperties", True)]:
                self.check(part, value, here, depth)
            if "propertyNames" in schema:
                self.check(schema["propertyNames"], name, here, depth)
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, needed in schema.get(keyword, {}).items():
                if name in values:
                    then = {"required": needed} if isinstance(needed, list) else needed
                    self.check(then, values, path, depth)

    def _name_matches(self, pattern: str, name: str) -> bool:
        try:
            self._check_string("pattern", pattern, name, "#")
        except InvalidError:
            return False
        return True


def tuple_of(schema: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """The schemas of an array's first items, and that of the rest; also as older drafts write them."""
    items = schema.get("items", True)
    if isinstance(items, list):
        return items, schema.get("additionalItems", True)
    return schema.get("prefixItems", []), items


def _check_count(schema: Mapping[str, Any], count: int, least: str, most: str, path: str) -> None:
    if count < schema.get(least, 0):
        raise InvalidError(least, path)
    if count > schema.get(most, count):
        raise InvalidError(most, path)


def _check_number(schema: Mapping[str, Any], value: float, path: str) -> None:
    for keyword, bound in schema.items():
        match keyword:
            case "minimum":
                ok = value >= bound
            case "maximum":
                ok = value <= bound
            case "exclusiveMinimum" if bound is not False:
                ok = value > (schema.get("minimum", -math.inf) if bound is True else bound)
            case "exclusiveMaximum" if bound is not False:
                ok = value < (schema.get("maximum", math.inf) if bound is True else bound)
            case "multipleOf":
                ok = _is_multiple(value, bound)
            case _:
                ok = True
        if not ok:
            raise InvalidError(keyword, path)


def _is_multiple(value: float, step: float) -> bool:
    if isinstance(value, int) and isinstance(step, int):
        return value % step == 0
    try:
        ratio = value / step
    except OverflowError:
        return False
    return abs(ratio) < 2**53 and abs(ratio - round(ratio)) < 1e-9
