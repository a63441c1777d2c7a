"""vLLM's `structured_outputs`, which every API takes beside its own way to say what an answer must look like."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from quire.server.conversation.request import OutputFormat
from quire.types.errors import RequestError
from quire.types.structured import StructuredOutputsParams


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
        given["structural_tag"] = json_text(given["structural_tag"])
    constraint = StructuredOutputsParams(**given)
    return OutputFormat(constraint, f"structured_outputs.{constraint.constraint}")


def json_text(value: Any) -> str:
    return msgspec.json.encode(value).decode()
