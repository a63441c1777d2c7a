"""OpenAI's `response_format`: what the text of an answer must look like."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from quire.server.conversation.request import OutputFormat
from quire.server.generation.structured import StructuredOutputs, json_text, one_format
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


def output_format(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> OutputFormat | None:
    """What the two fields come to; None leaves the text free. Schemas are looked at later, off the event loop."""
    own = None if response_format is None else _of_response_format(response_format)
    return one_format(own, "response_format", structured_outputs)


def _of_response_format(wanted: ResponseFormat) -> OutputFormat | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return OutputFormat(StructuredOutputsParams(json_object=True), "response_format")
    if wanted.type == "structural_tag":
        tag = json_text({"type": wanted.type, **(wanted.model_extra or {})})
        return OutputFormat(StructuredOutputsParams(structural_tag=tag), "response_format")
    where = "response_format.json_schema.schema"
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise RequestError(f"{where} is missing; give the schema, or use the type 'json_object'", where)
    schema = wanted.json_schema.schema_
    if isinstance(schema, bool):
        raise RequestError(f"{where} is {schema}; give an object, or use the type 'json_object'", where)
    return OutputFormat(StructuredOutputsParams(json=schema), where, bool(wanted.json_schema.strict))
