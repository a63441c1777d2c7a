"""Turns the text of an argument into JSON of the type that the tool's schema asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.parsers.codec import Status
from quire.parsers.json_scan import JsonScanner, to_json

_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_KIND_OF_FIRST = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_MAX_DEPTH = 8  # of unions and references that are followed


def argument_types(parameters: Mapping[str, Any], name: str) -> frozenset[str]:
    """The JSON types an argument may have; all are possible if the schema does not say."""
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return _types(schema, parameters, _MAX_DEPTH) if isinstance(schema, Mapping) else frozenset()


def _types(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> frozenset[str]:
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(item for item in declared if isinstance(item, str))
    if depth == 0:
        return frozenset()
    values = (
        schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    )
    found = {_type_of(value) for value in values}
    for key in ("anyOf", "oneOf", "allOf"):
        for option in schema.get(key) or ():
            if isinstance(option, Mapping):
                found |= _types(option, root, depth - 1)
    target = resolve(schema, root)
    return frozenset(found) | (_types(target, root, depth - 1) if target is not schema else frozenset())


def resolve(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a schema refers to, or the schema itself."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    target: Any = root
    for part in reference[2:].split("/"):
        target = target.get(part) if isinstance(target, Mapping) else None
    return target if isinstance(target, Mapping) else schema


def _type_of(value: Any) -> str:
    kind = _KIND_OF_FIRST.get(to_json(value)[0], "number")
    return "integer" if kind == "number" and isinstance(value, int) else kind


def is_text(types: frozenset[str]) -> bool:
    """Whether the argument can only be a string, so that it can be passed on while it comes."""
    return types == {"string"}


def convert(text: str, types: frozenset[str]) -> str:
    """JSON for an argument's text: as one of these types if it can be read so, or else as a string."""
    if is_text(types):
        return to_json(text)
    stripped = text.strip()
    word = _WORDS.get(stripped.lower())
    candidate = word if word is not None else stripped
    scanner = JsonScanner()
    if scanner.scan(candidate, 0, final=True) == len(candidate) and scanner.status is Status.DONE:
        kind = _KIND_OF_FIRST.get(scanner.kind, "number")
        accepted = kind in types or (kind == "number" and "integer" in types)
        if accepted or (not types and kind != "string"):
            return scanner.take().strip()
    return to_json(text)
