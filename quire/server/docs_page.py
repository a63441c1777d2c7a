"""GET /docs: the OpenAPI description as a page to read and to try routes on, which loads nothing from elsewhere.

Knows the description of an app and none of its routes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from jinja2 import Environment, Template
from starlette.responses import HTMLResponse, RedirectResponse

Schema = dict[str, Any]


@dataclass(frozen=True)
class Field:
    name: str
    type: str
    required: bool
    description: str


@dataclass(frozen=True)
class Operation:
    method: str
    path: str
    tag: str
    description: str
    parameters: list[Field]
    bodies: list[list[Field]]
    """The fields of each form that a body may have; none: there is no body."""
    example: str


def docs_router(app: FastAPI) -> APIRouter:
    router = APIRouter()

    @router.get("/docs", include_in_schema=False)
    def docs(request: Request) -> HTMLResponse:
        return HTMLResponse(docs_page(app.openapi(), request.scope.get("root_path", "")))

    return router


def start_router() -> APIRouter:
    """For a server without a page of its own."""
    router = APIRouter()

    @router.get("/", include_in_schema=False)
    def start(request: Request) -> RedirectResponse:
        """Whoever opens the server's address in a browser sees something."""
        return RedirectResponse(f"{request.scope.get('root_path', '')}/docs")

    return router


def docs_page(description: Schema, root: str = "") -> str:
    """The page; `root` stands before every path where a proxy has put the server below one."""
    by_tag: dict[str, list[Operation]] = {}
    for operation in operations(description):
        by_tag.setdefault(operation.tag, []).append(operation)
    return _template().render(info=description["info"], by_tag=by_tag, root=root)


def operations(description: Schema) -> Iterator[Operation]:
    schemas = description.get("components", {}).get("schemas", {})
    for path, methods in description["paths"].items():
        for method, found in methods.items():
            content = found.get("requestBody", {}).get("content", {}).get("application/json", {})
            forms = [_resolved(form, schemas) for form in _forms(content.get("schema"), schemas)]
            yield Operation(
                method.upper(),
                path,
                found.get("tags", ["Other"])[0],
                found.get("description") or found.get("summary", ""),
                [_field(p["name"], p | p["schema"], p.get("required", False), schemas) for p in _parameters(found)],
                [_fields(form, schemas) for form in forms],
                _example(forms),
            )


def type_text(schema: Schema, schemas: Schema) -> str:
    """A type in few words; what an object holds is left to the description."""
    schema = _resolved(schema, schemas)
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return " or ".join(json.dumps(value) for value in schema["enum"])
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        texts = dict.fromkeys(type_text(option, schemas) for option in options)
        return " or ".join(text for text in texts if text != "null")
    if schema.get("type") == "array":
        return f"list of {type_text(schema.get('items', {}), schemas)}"
    return str(schema.get("type", "anything"))


def _parameters(operation: Schema) -> list[Schema]:
    return [parameter for parameter in operation.get("parameters", []) if parameter["in"] in ("path", "query")]


def _forms(schema: Schema | None, schemas: Schema) -> list[Schema]:
    if schema is None:
        return []
    schema = _resolved(schema, schemas)
    return schema.get("anyOf") or schema.get("oneOf") or [schema]


def _fields(form: Schema, schemas: Schema) -> list[Field]:
    required = form.get("required", [])
    fields = [_field(name, field, name in required, schemas) for name, field in form.get("properties", {}).items()]
    return sorted(fields, key=lambda field: not field.required)


def _field(name: str, schema: Schema, required: bool, schemas: Schema) -> Field:
    return Field(name, type_text(schema, schemas), required, schema.get("description", ""))


def _example(forms: list[Schema]) -> str:
    examples = [example for form in forms for example in form.get("examples", [])]
    return json.dumps(examples[0] if examples else {}, indent=2, ensure_ascii=False)


def _resolved(schema: Schema, schemas: Schema) -> Schema:
    while "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    return schema


@cache
def _template() -> Template:
    text = files("quire.server").joinpath("docs_page.html").read_text(encoding="utf-8")
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)
