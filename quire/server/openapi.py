"""What the OpenAPI page says of answers: they are msgspec structs, of which FastAPI knows nothing by itself."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from quire.server.errors import ErrorBody

_ERRORS: dict[int | str, str] = {
    "4XX": "The request is wrong or not allowed; `param` names the field.",
    500: "The engine failed.",
    503: "The server takes no requests now; try again after the seconds in Retry-After.",
}


def answers(
    body: Any, event: Any = None, *, error: Any = ErrorBody, stream_type: str = "text/event-stream"
) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that answers with `body`, or with `event`s when it streams."""
    content = {"application/json": {"schema": schema_of(body)}}
    if event is not None:
        content[stream_type] = {"schema": schema_of(event)}
    failed = {"application/json": {"schema": schema_of(error)}}
    found: dict[int | str, dict[str, Any]] = {200: {"description": "The answer.", "content": content}}
    return found | {status: {"description": text, "content": failed} for status, text in _ERRORS.items()}


@cache
def schema_of(struct: Any) -> dict[str, Any]:
    """The struct's JSON schema without references, since FastAPI has no place to put definitions: read only."""
    (schema,), components = msgspec.json.schema_components([struct], ref_template="{name}")
    inlined = _inline(schema, components)
    assert isinstance(inlined, dict)
    return inlined


def _inline(schema: Any, components: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inline(item, components) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(components[schema["$ref"]], components)
    return {key: _inline(value, components) for key, value in schema.items()}
