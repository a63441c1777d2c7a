"""response_format and structured_outputs: what they come to, and that large schemas are not copied."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.server.openai.sampling import SamplingFields
from quire.server.openai.structured import output_format
from quire.types.errors import RequestError
from quire.types.structured import StructuredOutputsParams

SCHEMA: dict[str, Any] = {"type": "object"}


def wanted(**fields: Any) -> tuple[StructuredOutputsParams, str] | None:
    body = SamplingFields.model_validate(fields)
    found = output_format(body.response_format, body.structured_outputs)
    return None if found is None else (found.constraint, found.where)


def test_response_format() -> None:
    assert wanted() is wanted(response_format={"type": "text"}) is None
    assert wanted(response_format={"type": "json_object"}) == (
        StructuredOutputsParams(json_object=True),
        "response_format",
    )
    schema = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}
    assert wanted(response_format=schema) == (
        StructuredOutputsParams(json=SCHEMA),
        "response_format.json_schema.schema",
    )
    tag = {"type": "structural_tag", "format": {"type": "any_text"}}
    found = wanted(response_format=tag)
    assert found is not None
    assert json.loads(found[0].structural_tag or "") == tag


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"json": SCHEMA, "disable_any_whitespace": True}, "json"),
        ({"json": '{"type": "object"}'}, "json"),
        ({"regex": "a"}, "regex"),
        ({"choice": ["a"]}, "choice"),
        ({"grammar": 'start: "a"'}, "grammar"),
        ({"json_object": True}, "json_object"),
        ({"structural_tag": "{}"}, "structural_tag"),
    ],
)
def test_structured_outputs(given: dict[str, Any], name: str) -> None:
    assert wanted(structured_outputs=given) == (StructuredOutputsParams(**given), f"structured_outputs.{name}")
    assert wanted(structured_outputs=given, response_format={"type": "text"}) is not None
    with pytest.raises(RequestError, match="leave one of them out"):
        wanted(structured_outputs=given, response_format={"type": "json_object"})


def test_a_structural_tag_may_be_an_object() -> None:
    found = wanted(structured_outputs={"structural_tag": {"format": {"type": "any_text"}}})
    assert found is not None
    assert json.loads(found[0].structural_tag or "") == {"format": {"type": "any_text"}}


def test_a_schema_is_handed_over_as_it_is() -> None:
    """Copying a megabyte of it would hold up the event loop."""
    body = SamplingFields.model_validate({"structured_outputs": {"json": SCHEMA}})
    assert body.structured_outputs is not None
    found = output_format(body.response_format, body.structured_outputs)
    assert found is not None
    assert found.constraint.json is body.structured_outputs.json_
