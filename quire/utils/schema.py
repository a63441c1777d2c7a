"""Values from files that people edit and downloads damage, checked against what they may be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from quire.types.errors import QuireError


def decode_json(content: bytes) -> Any:
    """Whatever JSON the content is; ValueError for what is none, too deep nesting included."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def check_values(
    path: Path, values: Mapping[str, Any], schema: type[msgspec.Struct], error: type[QuireError]
) -> None:
    """Raise `error`, which names key and value, if one of the schema's keys cannot have its value.

    Keys may be absent or null. Others are not looked at.
    """
    for key in schema.__struct_fields__:
        value = values.get(key)
        if value is None:
            continue
        try:
            msgspec.convert({key: value}, schema)
        except msgspec.ValidationError as wrong:
            shown = repr(value)
            shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
            raise error(f"{path}: {key} is {shown} ({wrong}); correct it, or download the file again") from wrong
