"""Checks a JSON schema before anything is compiled: what is not understood is refused with its keyword and place.

Knows JSON Schema's keywords, and from the backend which of them it enforces. The result is the schema in these
keywords, without what says nothing about the output (titles, descriptions, keywords at their neutral value).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from quire.structured.base import FORMATS, SchemaSupport
from quire.structured.instance import CheckText, is_of_type
from quire.structured.rewrite import REWRITTEN, Rewriter
from quire.structured.separate import Separator
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
# By the standard, any other unknown keyword is an annotation.
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
    "not": (False,),
    "minContains": (1,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "required": ([],),
}
_IN_CONDITIONS = frozenset({"not", "if", "then", "else", "propertyNames", "contains"})
_CONDITIONS = _IN_CONDITIONS | {"dependentSchemas", "dependencies"}
_ONE_SCHEMA = _IN_CONDITIONS | {
    *("additionalProperties", "additionalItems", "unevaluatedProperties", "unevaluatedItems")
}
_LISTS_OF_SCHEMAS = frozenset({"anyOf", "allOf", "oneOf", "prefixItems"})
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"}) | {
    *("minContains", "maxContains")
}
_OLD_BOUNDS = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
_NEEDS_REWRITING = REWRITTEN | {"minProperties", "maxProperties"}
_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})


class SchemaCheck:
    """One pass over a schema. `field` names the schema in messages.

    If not `is_strict`, what cannot be enforced is left out and named in `not_enforced`.
    """

    def __init__(
        self,
        support: SchemaSupport,
        check_regex: CheckRegex,
        check_text: CheckText,
        field: str,
        *,
        max_depth: int = 64,
        closes_objects: bool = False,
        is_strict: bool = True,
    ) -> None:
        self._support = support
        self._check_regex = check_regex
        self._check_text = check_text
        self._field = field
        self._max_depth = max_depth
        self._closes_objects = closes_objects
        self._is_strict = is_strict
        self._root: Any = None
        self._rewrites = False
        self.not_enforced: list[str] = []
        self.is_exact = True
        """Whether all that the schema allows is allowed, if properties come in the order of the schema."""

    def run(self, schema: Any) -> Any:
        """The schema in canonical form; GrammarError names what cannot be enforced."""
        self._root = schema
        found = self._schema(schema, (), 0)
        if self._rewrites:
            rewriter = Rewriter(found, self._support.keywords, self._check_text, self._lose, self._is_strict)
            found = rewriter.run()
            self.is_exact = rewriter.is_exact
        if not self._support.combines:
            found = Separator(found, self._check_text, self._lose, self._refuse_values).run()
        return found

    def _refuse_values(self, keyword: str, path: tuple[str, ...]) -> None:
        raise self._error(keyword, path, "has no value that obeys the keywords beside it; change one of them")

    def _lose(self, keyword: str, path: tuple[str, ...], why: str) -> None:
        """Refuse what cannot be enforced, or note that it is left out."""
        if self._is_strict:
            remedy = "leave it out or say it with other keywords"
            raise self._error(keyword, path, f"is not supported here: {why}; {remedy}")
        self.not_enforced.append(f"{keyword} at {_pointer(path)}")

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
            if keyword in _ANNOTATIONS or _is_neutral(keyword, value):
                continue
            if keyword in self._support.keywords or keyword in REWRITTEN:
                checked = self._value(keyword, value, here, depth + 1)
                if not self._is_lost(keyword, value, here):
                    found[keyword] = checked
            elif keyword in _CONSTRAINTS:
                self._lose(keyword, here, "nothing enforces it")
        if "enum" in found and "type" in found:
            found["enum"] = self._enum_of_type(found["enum"], found["type"], (*path, "enum"))
        _use_old_bounds(found)
        if "patternProperties" in schema and "patternProperties" not in found:
            found.pop("additionalProperties", None)  # it would apply to the names of the lost patterns too
        self._check_object(found, path)
        self._rewrites = self._rewrites or not found.keys().isdisjoint(_NEEDS_REWRITING)
        return found

    def _value(self, keyword: str, value: Any, path: tuple[str, ...], depth: int) -> Any:
        if keyword in _NAMED_SCHEMAS:
            if not isinstance(value, dict):
                raise self._wrong(keyword, path, value, "an object whose values are schemas")
            return {name: self._schema(part, (*path, name), depth + 1) for name, part in value.items()}
        if keyword in _LISTS_OF_SCHEMAS or (keyword == "items" and isinstance(value, list)):
            if not isinstance(value, list) or not value:
                raise self._wrong(keyword, path, value, "a list of schemas that is not empty")
            return [self._schema(part, (*path, str(index)), depth + 1) for index, part in enumerate(value)]
        if keyword in _ONE_SCHEMA or keyword == "items":
            return self._schema(value, path, depth)
        if keyword == "dependencies" and isinstance(value, dict):
            return {
                name: part if _is_names(part) else self._schema(part, (*path, name), depth + 1)
                for name, part in value.items()
            }
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
            if keyword in _OLD_BOUNDS and isinstance(value, bool):
                return
            # Beyond the range of float64 a number is none to any backend, and no integer can be compared with one.
            is_number = type(value) in (int, float) and abs(value) <= sys.float_info.max
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
            if not _is_names(value):
                raise self._wrong(keyword, path, value, "a list of names")
        elif keyword in ("dependentRequired", "dependencies"):
            if not isinstance(value, dict) or not all(map(_is_names, value.values())):
                raise self._wrong(keyword, path, value, "an object whose values are lists of names")
        elif keyword == "uniqueItems":
            if not isinstance(value, bool):
                raise self._wrong(keyword, path, value, "true or false")
        elif keyword in ("pattern", "format"):
            if not isinstance(value, str):
                words = "a regular expression" if keyword == "pattern" else "the name of a format"
                raise self._wrong(keyword, path, value, words)
        elif keyword == "$ref":
            self._reference(value, path)

    def _enum_of_type(self, values: list[Any], types: str | list[str], path: tuple[str, ...]) -> list[Any]:
        """Those of the values that the type beside them lets through."""
        names = [types] if isinstance(types, str) else types
        fitting = [value for value in values if any(is_of_type(value, name) for name in names)]
        if not fitting:
            raise self._wrong("enum", path, values, f"a list with a value of type {' or '.join(names)}")
        return fitting

    def _is_lost(self, keyword: str, value: Any, path: tuple[str, ...]) -> bool:
        """Whether a value, though well-formed, is one that cannot be enforced."""
        if keyword == "format" and value not in self._support.formats:
            self._lose(keyword, path, f"{value!r} is not enforced")
            return True
        for pattern in [value] if keyword == "pattern" else value if keyword == "patternProperties" else ():
            reason = self._check_regex(pattern)
            if reason is not None:
                where = path if keyword == "pattern" else (*path, pattern)
                self._lose(keyword, where, f"{pattern!r:.60} cannot be used: {reason}")
                return True
        return False

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
        is_condition = not _CONDITIONS.isdisjoint(path)
        is_open = "additionalProperties" not in found and "patternProperties" not in found
        if self._closes_objects and is_open and not is_condition:
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
        pointer = _pointer(path)
        return GrammarError(f"{self._field}: {keyword} at {pointer} {message}", self._field, keyword, pointer)


def _pointer(path: tuple[str, ...]) -> str:
    return "#/" + "/".join(part.replace("~", "~0").replace("/", "~1") for part in path) if path else "#"


def _is_neutral(keyword: str, value: Any) -> bool:
    """Whether a keyword says nothing with this value."""
    if keyword == "format":
        return isinstance(value, str) and value not in FORMATS
    # 1 and true are equal in Python.
    return any(value == neutral and type(value) is type(neutral) for neutral in _NEUTRAL.get(keyword, ()))


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _use_old_bounds(found: dict[str, Any]) -> None:
    """Draft 4, and OpenAPI 3.0 after it, say with true that a bound itself is excluded."""
    for exclusive, bound in _OLD_BOUNDS.items():
        if isinstance(found.get(exclusive), bool) and found.pop(exclusive) and bound in found:
            found[exclusive] = found.pop(bound)
