"""Rewrites a schema so that no keyword depends on another beside it, for a backend that reads only one of them.

Such a backend looks at `enum`, `const`, `$ref` or `anyOf` and ignores what stands beside them, and without a `type`
ignores bounds or takes one type for granted. What obeys the result obeys the schema.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.structured.instance import CheckText, NotCheckedError, Validator

OnLoss = Callable[[str, tuple[str, ...], str], None]
OnNothing = Callable[[str, tuple[str, ...]], None]

_ALL_TYPES = ["string", "number", "boolean", "null", "array", "object"]
_SAY_NOTHING = frozenset({"$defs", "definitions", "$schema"})
_NAMED = frozenset({"properties", "$defs", "definitions"})
_LISTED = frozenset({"anyOf", "prefixItems"})
_SINGLE = frozenset({"items", "additionalProperties"})
# In each pair, the second keyword applies to what the first one does not name.
_RELATED = (("properties", "additionalProperties"), ("prefixItems", "items"))

Path = tuple[str, ...]


class Separator:
    """Separates one schema. `on_loss` gets each keyword that is left out, `on_nothing` one that no value obeys."""

    def __init__(self, root: Any, check_text: CheckText, on_loss: OnLoss, on_nothing: OnNothing) -> None:
        self._root = root
        self._validator = Validator(root, check_text)
        self._on_loss = on_loss
        self._on_nothing = on_nothing

    def run(self) -> Any:
        return self._schema(self._root, ())

    def _schema(self, schema: Any, path: Path) -> Any:
        if isinstance(schema, bool):
            return schema
        beside = {keyword: value for keyword, value in schema.items() if keyword in _SAY_NOTHING}
        said = {keyword: value for keyword, value in schema.items() if keyword not in _SAY_NOTHING}
        if "enum" in said:
            said.pop("type", None)  # its values have been filtered by the type
        if len(said) > 1:
            if not said.keys().isdisjoint({"enum", "const"}):
                said = self._values(said, path)
            elif "$ref" in said:
                said = self._reference(said, path)
            elif "anyOf" in said:
                said = self._alternatives(said, path)
        if said and said.keys().isdisjoint({"type", "enum", "const", "$ref", "anyOf"}):
            said["type"] = _ALL_TYPES
        return {keyword: self._value(keyword, value, (*path, keyword)) for keyword, value in (beside | said).items()}

    def _value(self, keyword: str, value: Any, path: Path) -> Any:
        if keyword in _NAMED:
            return {name: self._schema(part, (*path, name)) for name, part in value.items()}
        if keyword in _LISTED or (keyword == "items" and isinstance(value, list)):
            return [self._schema(part, (*path, str(index))) for index, part in enumerate(value)]
        return self._schema(value, path) if keyword in _SINGLE else value

    def _values(self, said: dict[str, Any], path: Path) -> dict[str, Any]:
        """Those of the values that obey the keywords beside them."""
        keyword = "enum" if "enum" in said else "const"
        values = said["enum"] if keyword == "enum" else [said["const"]]
        try:
            fitting = [value for value in values if self._validator.is_valid(said, value)]
        except NotCheckedError as error:
            for other in said.keys() - {keyword}:
                self._on_loss(other, (*path, other), f"it stands beside {keyword}, and {error}")
            return {keyword: said[keyword]}
        if not fitting:
            self._on_nothing(keyword, (*path, keyword))
        return {"enum": fitting or values}

    def _reference(self, said: dict[str, Any], path: Path) -> dict[str, Any]:
        for other in said.keys() - {"$ref"}:
            self._on_loss(other, (*path, other), "it stands beside a $ref, where it would be ignored")
        return {"$ref": said["$ref"]}

    def _alternatives(self, said: dict[str, Any], path: Path) -> dict[str, Any]:
        """The keywords beside `anyOf` in each of its alternatives."""
        rest = {keyword: value for keyword, value in said.items() if keyword != "anyOf"}
        found: list[Any] = []
        for option in said["anyOf"]:
            if option is False:
                continue
            option = {} if option is True else option
            if not _are_apart(rest, option):
                self._on_loss(
                    "anyOf", (*path, "anyOf"), "an alternative has the same keywords as the schema around it"
                )
                return rest
            found.append(rest | option)
        return {"anyOf": found} if found else {"anyOf": said["anyOf"]}


def _are_apart(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether the keywords of two schemas can be merged into one schema with the same meaning."""
    if not one.keys().isdisjoint(other):
        return False
    pairs = [*_RELATED, *((last, first) for first, last in _RELATED)]
    return not any(first in one and last in other for first, last in pairs)
