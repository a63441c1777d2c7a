"""The fields that say what an answer must look like: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from quire.server.conversation.request import OutputFormat
from quire.types.errors import RequestError
from quire.types.structured import StructuredOutputsParams


class JsonSchemaFormat(BaseModel):
    """A named schema. What cannot be enforced of it is refused if it is `strict`, or else checked afterwards."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(BaseModel):
    """Exactly one of the first six. A key that is not known is refused: ignoring it would free the output."""

    model_config = ConfigDict(extra="forbid")

    json_: str | dict[str, Any] | None = Field(None, alias="json", description="A JSON schema.")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = Field(None, description="A Lark or GBNF grammar.")
    json_object: bool | None = Field(None, description="Any JSON object.")
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


def output_format(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> OutputFormat | None:
    """What the two fields come to; None leaves the text free. Schemas are looked at later, off the event loop."""
    own = None if response_format is None else _of_response_format(response_format)
    return one_format(own, "response_format", structured_outputs)


def one_format(
    own: OutputFormat | None, field: str, structured_outputs: StructuredOutputs | None
) -> OutputFormat | None:
    """The format that an API asks for by a `field` of its own, or the one of `structured_outputs`; not both."""
    constraint = _constraint(structured_outputs)
    if own is not None and constraint is not None:
        raise RequestError(
            f"{field} and structured_outputs both constrain the text; leave one of them out", "structured_outputs"
        )
    return own or constraint


def _constraint(wanted: StructuredOutputs | None) -> OutputFormat | None:
    if wanted is None or not wanted.model_fields_set:
        return None
    # Not by model_dump, which would copy every part of a schema.
    given = {name.rstrip("_"): value for name, value in wanted if value is not None}
    if isinstance(given.get("structural_tag"), dict):
        given["structural_tag"] = _json(given["structural_tag"])
    constraint = StructuredOutputsParams(**given)
    return OutputFormat(constraint, f"structured_outputs.{constraint.constraint}")


def _of_response_format(wanted: ResponseFormat) -> OutputFormat | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return OutputFormat(StructuredOutputsParams(json_object=True), "response_format")
    if wanted.type == "structural_tag":
        tag = _json({"type": wanted.type, **(wanted.model_extra or {})})
        return OutputFormat(StructuredOutputsParams(structural_tag=tag), "response_format")
    where = "response_format.json_schema.schema"
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise RequestError(f"{where} is missing; give the schema, or use the type 'json_object'", where)
    schema = wanted.json_schema.schema_
    if isinstance(schema, bool):
        raise RequestError(f"{where} is {schema}; give an object, or use the type 'json_object'", where)
    return OutputFormat(StructuredOutputsParams(json=schema), where, bool(wanted.json_schema.strict))


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
