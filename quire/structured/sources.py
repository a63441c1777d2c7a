"""From what a caller asks for to what the engine compiles: checked, limited in size, in one canonical spelling.

Compiles nothing. Runs in the frontend; a large schema takes milliseconds, so callers on an event loop ask `is_large`
and use a thread.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from quire.structured.base import Backend
from quire.structured.registry import BACKENDS
from quire.structured.rewrite import REWRITTEN
from quire.structured.schema import SchemaCheck
from quire.structured.structural_tag import lark_of_tag, with_schemas
from quire.types.structured import GrammarError, GrammarLimits, GrammarSource, StructuredOutputsParams

_LARGE = 2_000  # characters, or parts of a schema


def is_large(params: StructuredOutputsParams) -> bool:
    """Whether `make_source` may take long enough to be worth a thread."""
    name = params.constraint
    value = getattr(params, name)
    if isinstance(value, dict):
        return _size_of(value, _LARGE) >= _LARGE
    if isinstance(value, str):
        return len(value) >= _LARGE or (name == "json" and any(f'"{keyword}"' in value for keyword in REWRITTEN))
    return isinstance(value, list) and sum(map(len, value)) >= _LARGE


def make_source(params: StructuredOutputsParams, limits: GrammarLimits | None = None) -> GrammarSource:
    """Check what was asked for; GrammarError names the part that is wrong or not supported."""
    limits = limits or GrammarLimits()
    backend = BACKENDS.get(limits.backend)
    name = params.constraint
    field = f"structured_outputs.{name}"
    match name:
        case "json":
            schema = _read_json(params.json, field, limits)
            return _json_source(schema, params, backend, field, limits)
        case "json_object":
            return _json_source({"type": "object"}, params, backend, field, limits)
        case "choice":
            text = _dump(_strings(params.choice, field), field, limits)
            return GrammarSource("choice", text)
        case "structural_tag":
            tag = _read_json(params.structural_tag, field, limits)
            return GrammarSource("structural_tag", _check_tag(tag, params, backend, field, limits))
        case "regex":
            pattern = _text(params.regex, field, limits)
            reason = backend.check_regex(pattern)
            if reason is not None:
                raise GrammarError(f"{field} is {pattern!r:.60}, which cannot be used: {reason}; change it", field)
            return GrammarSource("regex", pattern)
        case _:
            return GrammarSource("grammar", _text(params.grammar, field, limits))


def relax_schema(
    params: StructuredOutputsParams, limits: GrammarLimits | None = None
) -> tuple[StructuredOutputsParams, list[str]]:
    """Return the params with a schema that can be enforced as a whole, and the keywords that were left out."""
    limits = limits or GrammarLimits()
    backend = BACKENDS.get(limits.backend)
    field = "structured_outputs.json"
    schema = _read_json(params.json, field, limits)
    check = _schema_check(params, backend, field, limits, is_strict=False)
    return msgspec.structs.replace(params, json=check.run(schema)), check.not_enforced


def _json_source(
    schema: Any, params: StructuredOutputsParams, backend: type[Backend], field: str, limits: GrammarLimits
) -> GrammarSource:
    checked = _check_schema(schema, params, backend, field, limits)
    whitespace = "" if params.disable_any_whitespace else params.whitespace_pattern
    if whitespace:
        reason = backend.check_regex(whitespace)
        if reason is not None:
            name = "structured_outputs.whitespace_pattern"
            raise GrammarError(f"{name} is {whitespace!r:.60}, which cannot be used: {reason}; change it", name)
    return GrammarSource("json", _dump(checked, field, limits), whitespace)


def _check_schema(
    schema: Any, params: StructuredOutputsParams, backend: type[Backend], field: str, limits: GrammarLimits
) -> Any:
    return _schema_check(params, backend, field, limits).run(schema)


def _schema_check(
    params: StructuredOutputsParams,
    backend: type[Backend],
    field: str,
    limits: GrammarLimits,
    is_strict: bool = True,
) -> SchemaCheck:
    return SchemaCheck(
        backend.schema_support,
        backend.check_regex,
        backend.check_text,
        field,
        max_depth=limits.max_depth,
        closes_objects=params.disable_additional_properties,
        is_strict=is_strict,
    )


def _check_tag(
    tag: Any, params: StructuredOutputsParams, backend: type[Backend], field: str, limits: GrammarLimits
) -> str:
    if not isinstance(tag, dict):
        raise GrammarError(f"{field} is {tag!r:.60} but must be a JSON object with format or structures", field)

    def check(path: str, schema: Any) -> Any:
        return _check_schema(schema, params, backend, f"{field}: {path}", limits)

    tag = with_schemas(tag, check)
    lark_of_tag(tag, lambda schema: schema)
    return _dump(tag, field, limits)


def _read_json(value: str | dict[str, Any] | None, field: str, limits: GrammarLimits) -> Any:
    if not isinstance(value, str):
        return value
    text = _text(value, field, limits)
    try:
        return json.loads(text)
    except RecursionError as error:
        raise _too_deep(field, limits) from error
    except ValueError as error:
        raise GrammarError(f"{field} is {text!r:.60}, which is not JSON: {error}; correct it", field) from error


def _dump(value: Any, field: str, limits: GrammarLimits) -> str:
    """JSON in one spelling. The order of keys is kept: it is the order in which properties are generated."""
    try:
        return _text(json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False), field, limits)
    except RecursionError as error:
        raise _too_deep(field, limits) from error
    except (TypeError, ValueError) as error:
        if isinstance(error, GrammarError):
            raise
        raise GrammarError(f"{field} holds what JSON cannot: {error}; give JSON values only", field) from error


def _text(value: Any, field: str, limits: GrammarLimits) -> str:
    if not isinstance(value, str) or not value:
        raise GrammarError(f"{field} is {value!r:.60} but must be text that is not empty", field)
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise GrammarError(f"{field} has a lone surrogate at {error.start}; send valid Unicode", field) from error
    if size > limits.max_bytes:
        raise GrammarError(
            f"{field} has {size} bytes but at most {limits.max_bytes} are allowed; make it smaller or start the"
            " server with a larger --structured-outputs-max-bytes",
            field,
        )
    return value


def _strings(choices: list[str] | None, field: str) -> list[str]:
    wrong = next((choice for choice in choices or () if not isinstance(choice, str) or not choice), None)
    if not choices or wrong is not None:
        raise GrammarError(f"{field} holds {wrong!r:.60} but must hold strings that are not empty", field)
    return list(dict.fromkeys(choices))


def _too_deep(field: str, limits: GrammarLimits) -> GrammarError:
    return GrammarError(f"{field} is nested more than {limits.max_depth} levels deep; flatten it", field, "nesting")


def _size_of(value: Any, limit: int) -> int:
    """How many parts a schema has; stops counting at the limit. What has to be rewritten may take any time."""
    count, waiting = 0, [value]
    while waiting and count < limit:
        part = waiting.pop()
        count += 1 + (len(part) if isinstance(part, str) else 0)
        if isinstance(part, dict):
            if not part.keys().isdisjoint(REWRITTEN):
                return limit
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return count
