"""Checks a JSON schema before anything is compiled: what is not understood is refused with its keyword and place.

Knows JSON Schema's keywords, and from the backend which of them it enforces. The result is the schema without what
says nothing about the output (titles, descriptions, keywords at their neutral value).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from quire.structured.base import SchemaSupport
from quire.types.structured import GrammarError

CheckRegex = Callable[[str], str | None]

# More than this many properties that may be left out, in one object, take seconds to compile.
MAX_OPTIONAL = 1000

_TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
_SAYS_NOTHING = """
    title description default example examples $comment deprecated readOnly writeOnly discriminator nullable
    contentEncoding contentMediaType contentSchema $vocabulary $dynamicAnchor $recursiveAnchor x-guidance
"""
_ANNOTATIONS = frozenset(_SAYS_NOTHING.split())
# Any other keyword that is unknown says nothing either: so the standard wants it.
_CONSTRAINS = """
    type enum const not if then else anyOf allOf oneOf $ref $dynamicRef $recursiveRef
    properties required additionalProperties patternProperties minProperties maxProperties propertyNames
    dependentSchemas dependentRequired dependencies unevaluatedProperties
    items prefixItems additionalItems minItems maxItems contains minContains maxContains uniqueItems unevaluatedItems
    minLength maxLength pattern format minimum maximum exclusiveMinimum exclusiveMaximum multipleOf
"""
_CONSTRAINTS = frozenset(_CONSTRAINS.split())
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "propertyNames": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "required": ([],),
}
_ONE_SCHEMA = frozenset({"additionalProperties", "additionalItems"})
_LISTS_OF_SCHEMAS = frozenset({"anyOf", "allOf", "oneOf", "prefixItems"})
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})


class SchemaCheck:
    """One pass over a schema. `field` names the schema in messages."""

    def __init__(
        self,
        support: SchemaSupport,
        check_regex: CheckRegex,
        field: str,
        *,
        max_depth: int = 64,
        closes_objects: bool = False,
    ) -> None:
        self._support = support
        self._check_regex = check_regex
        self._field = field
        self._max_depth = max_depth
        self._closes_objects = closes_objects
        self._root: Any = None

    def run(self, schema: Any) -> Any:
        """The schema in canonical form; GrammarError names what cannot be enforced."""
        self._root = schema
        return self._schema(schema, (), 0)

    def _schema(self, schema: Any, path: tuple[str, ...], depth: int) -> Any:
        if depth > self._max_depth:
            raise self._error("nesting", path, f"is nested more than {self._max_depth} levels deep; flatten it")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise self._error("schema", path, f"is {schema!r:.60} but a schema is an object, true or false")
        found: dict[str, Any] = {}
        for keyword, value in schema.items():
            here = (*path, keyword)
            if keyword in _ANNOTATIONS or value in _NEUTRAL.get(keyword, ()):
                continue
            if keyword in self._support.keywords:
                found[keyword] = self._value(keyword, value, here, depth + 1)
            elif keyword in _CONSTRAINTS:
                raise self._error(keyword, here, "is not supported; leave it out or say it with other keywords")
        if "enum" in found and "type" in found:
            found["enum"] = self._enum_of_type(found["enum"], found["type"], (*path, "enum"))
        self._check_object(found, path)
        return found

    def _value(self, keyword: str, value: Any, path: tuple[str, ...], depth: int) -> Any:
        if keyword in _NAMED_SCHEMAS:
            if not isinstance(value, dict):
                raise self._wrong(keyword, path, value, "an object whose values are schemas")
            if keyword == "patternProperties":
                for pattern in value:
                    self._pattern(keyword, pattern, (*path, pattern))
            return {name: self._schema(part, (*path, name), depth + 1) for name, part in value.items()}
        if keyword in _LISTS_OF_SCHEMAS or (keyword == "items" and isinstance(value, list)):
            if not isinstance(value, list) or not value:
                raise self._wrong(keyword, path, value, "a list of schemas that is not empty")
            return [self._schema(part, (*path, str(index)), depth + 1) for index, part in enumerate(value)]
        if keyword in _ONE_SCHEMA or keyword == "items":
            return self._schema(value, path, depth)
        self._check_value(keyword, value, path)
        return value

    def _check_value(self, keyword: str, value: Any, path: tuple[str, ...]) -> None:
        """A keyword whose value is no schema."""
        if keyword in _COUNTS:
            if type(value) is float and value.is_integer():
                value = int(value)
            if type(value) is not int or value < 0:
                raise self._wrong(keyword, path, value, "an integer, 0 or more")
        elif keyword in _NUMBERS:
            is_number = isinstance(value, (int, float)) and math.isfinite(value)
            if not is_number or (keyword == "multipleOf" and value <= 0):
                raise self._wrong(keyword, path, value, "a number above 0" if keyword == "multipleOf" else "a number")
        elif keyword == "type":
            names = value if isinstance(value, list) else [value]
            if not names or any(name not in _TYPES for name in names):
                raise self._wrong(keyword, path, value, f"one or a list of {', '.join(_TYPES)}")
        elif keyword == "enum":
            if not isinstance(value, list) or not value:
                raise self._wrong(keyword, path, value, "a list of values that is not empty")
        elif keyword == "required":
            if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                raise self._wrong(keyword, path, value, "a list of names")
        elif keyword == "pattern":
            self._pattern(keyword, value, path)
        elif keyword == "format":
            if value not in self._support.formats:
                raise self._wrong(keyword, path, value, f"one of {', '.join(sorted(self._support.formats))}")
        elif keyword == "$ref":
            self._reference(value, path)

    def _enum_of_type(self, values: list[Any], types: str | list[str], path: tuple[str, ...]) -> list[Any]:
        """Those of the values that the type beside them lets through."""
        names = [types] if isinstance(types, str) else types
        fitting = [value for value in values if any(_is_of_type(value, name) for name in names)]
        if not fitting:
            raise self._wrong("enum", path, values, f"a list with a value of type {' or '.join(names)}")
        return fitting

    def _pattern(self, keyword: str, value: Any, path: tuple[str, ...]) -> None:
        if not isinstance(value, str):
            raise self._wrong(keyword, path, value, "a regular expression")
        reason = self._check_regex(value)
        if reason is not None:
            raise self._error(keyword, path, f"is {value!r:.60}, which cannot be used: {reason}; change it")

    def _reference(self, value: Any, path: tuple[str, ...]) -> None:
        """A reference has to point into this schema: nothing is fetched."""
        if not isinstance(value, str):
            raise self._wrong("$ref", path, value, "text such as #/$defs/name")
        if value == "#" or (value.startswith("#") and not value.startswith("#/")):
            return  # the whole schema, or an anchor
        target = self._root
        if not value.startswith("#/"):
            raise self._wrong("$ref", path, value, "a reference into the schema itself, such as #/$defs/name")
        for part in value[2:].split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                target = target[int(name)]
            elif isinstance(target, dict) and name in target:
                target = target[name]
            else:
                raise self._error("$ref", path, f"is {value!r:.60}, which is not in the schema; define it there")

    def _check_object(self, found: dict[str, Any], path: tuple[str, ...]) -> None:
        self._name_required(found)
        properties = found.get("properties")
        if properties is None:
            return
        optional = len(properties.keys() - set(found.get("required", ())))
        if optional > MAX_OPTIONAL:
            raise self._error(
                "properties",
                (*path, "properties"),
                f"has {optional} properties that are not required, of which at most {MAX_OPTIONAL} compile in time;"
                " make them required or split the object",
            )
        if self._closes_objects and "additionalProperties" not in found and "patternProperties" not in found:
            found["additionalProperties"] = False

    def _name_required(self, found: dict[str, Any]) -> None:
        """List what is required among the properties too: not every backend looks for it elsewhere."""
        others = found.get("additionalProperties", True)
        missing = [name for name in found.get("required", ()) if name not in found.get("properties", {})]
        if missing and others is not False and "patternProperties" not in found:
            found["properties"] = {**found.get("properties", {}), **dict.fromkeys(missing, others)}

    def _wrong(self, keyword: str, path: tuple[str, ...], value: Any, allowed: str) -> GrammarError:
        return self._error(keyword, path, f"is {value!r:.60} but must be {allowed}")

    def _error(self, keyword: str, path: tuple[str, ...], message: str) -> GrammarError:
        pointer = "#/" + "/".join(part.replace("~", "~0").replace("/", "~1") for part in path) if path else "#"
        return GrammarError(f"{self._field}: {keyword} at {pointer} {message}", self._field, keyword, pointer)


def _is_of_type(value: Any, name: str) -> bool:
    match name:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return type(value) is int or (type(value) is float and value.is_integer())
        case "number":
            return not isinstance(value, bool) and isinstance(value, (int, float))
        case "string":
            return isinstance(value, str)
        case "array":
            return isinstance(value, list)
        case _:
            return isinstance(value, dict)
