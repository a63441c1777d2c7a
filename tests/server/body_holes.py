"""Bodies made from the schemas that the server publishes, each with one place left open: a hole for any value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import FastAPI

Kind = Literal["string", "number"]
Build = Callable[[Any], Any]

# Strings that mean something where they stand, so that a body is whole but for its hole.
_WORDS = {"role": "user", "type": "text", "name": "f"}
_DEEPEST = 8


@dataclass(frozen=True)
class Hole:
    """One place in the body of one endpoint. `field` is the top-level field that it is in."""

    path: str
    field: str
    kind: Kind
    body: Build

    def __repr__(self) -> str:
        return f"{self.path} {self.field}"


def holes(app: FastAPI) -> Iterator[Hole]:
    """Every place for a string or a number in every body that the server takes, by its OpenAPI schema."""
    page = app.openapi()
    reader = _Reader(page["components"]["schemas"])
    for path, methods in page["paths"].items():
        for operation in methods.values():
            if "requestBody" in operation:
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                for model in reader.members(schema):
                    yield from reader.of_model(path, model)


class _Reader:
    def __init__(self, definitions: dict[str, Any]) -> None:
        self._definitions = definitions

    def members(self, schema: dict[str, Any]) -> list[dict[str, Any]]:
        """The alternatives of a schema, with references followed."""
        if "$ref" in schema:
            return self.members(self._definitions[schema["$ref"].rsplit("/", 1)[1]])
        if "anyOf" in schema:
            return [found for member in schema["anyOf"] for found in self.members(member)]
        return [schema]

    def of_model(self, path: str, model: dict[str, Any]) -> Iterator[Hole]:
        least = self._least(model)
        for field, schema in model["properties"].items():
            for kind, build in self._holes(schema, field, 0):
                yield Hole(path, field, kind, lambda value, b=build, f=field: {**least, f: b(value)})  # type: ignore[misc]
        for kind in ("string", "number"):
            yield Hole(path, "unknown", kind, lambda value: {**least, "unknown": [{"a": value}]})

    def _holes(self, schema: dict[str, Any], name: str, depth: int) -> Iterator[tuple[Kind, Build]]:
        if depth > _DEEPEST:
            return
        for member in self.members(schema):
            match member.get("type"):
                case "string":
                    yield "string", lambda value: value
                case "integer" | "number":
                    yield "number", lambda value: value
                case "array":
                    for kind, build in self._holes(member["items"], name, depth + 1):
                        yield kind, lambda value, b=build: [b(value)]  # type: ignore[misc]
                case "object":
                    yield from self._of_object(member, name, depth)
                case None if "enum" in member or "const" in member:
                    yield "string", lambda value: value
                case None:
                    yield from _free(name)

    def _of_object(self, schema: dict[str, Any], name: str, depth: int) -> Iterator[tuple[Kind, Build]]:
        least = self._least(schema)
        for key, inner in schema.get("properties", {}).items():
            for kind, build in self._holes(inner, key, depth + 1):
                yield kind, lambda value, b=build, k=key: {**least, k: b(value)}  # type: ignore[misc]
        more = schema.get("additionalProperties")
        if more is True or more == {}:
            for kind, build in _free(name):
                yield kind, lambda value, b=build: {**least, "more": b(value), **_spread(b(value))}  # type: ignore[misc]
        elif more:
            for kind, build in self._holes(more, name, depth + 1):
                yield kind, lambda value, b=build: {**least, "65": b(value)}  # type: ignore[misc]
        if more:
            yield "string", lambda value: {**least, value: 1}

    def _least(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The smallest object that fits: its required properties."""
        return {key: self._value(schema["properties"][key], key) for key in schema.get("required", ())}

    def _value(self, schema: dict[str, Any], name: str) -> Any:
        member = self.members(schema)[0]
        match member.get("type"):
            case "string":
                return member.get("enum", [_WORDS.get(name, "x")])[0]
            case "integer" | "number":
                return 16
            case "array":
                return [self._value(member["items"], name)]
            case "object":
                return self._least(member)
        return {}


def _free(name: str) -> Iterator[tuple[Kind, Build]]:
    """Holes in a value that may be anything: as it is, deep inside, and where a JSON schema would have it."""
    yield "string", lambda value: value
    yield "string", lambda value: [{"a": [value]}]
    yield "string", lambda value: _object({"type": "string", "description": value, "enum": [value]})
    yield "number", lambda value: [{"a": [value]}]
    yield "number", lambda value: _object({"type": "number", "maximum": value})
    yield "number", lambda value: _object({"type": "string", "maxLength": value})
    yield "number", lambda value: _object({"enum": [value]})


def _object(inner: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": inner}}


def _spread(value: Any) -> dict[str, Any]:
    """The schema itself, where a free object may be one."""
    return value if isinstance(value, dict) else {}
