"""Values of settings by their declared types; a wrong one is named beside the type that it must have."""

from __future__ import annotations

from types import NoneType
from typing import Any, Literal, get_args, get_origin

import msgspec

from quire.types.errors import ConfigError


def typed(name: str, value: Any, hint: Any) -> Any:
    """Return the value as the type `hint`; `name` is how an error calls it."""
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name} is {value!r} but must be {_describe(hint)}") from error


def _describe(hint: Any) -> str:
    """A type in words: "one of 'fcfs', 'priority'", "int or None"."""
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, get_args(hint)))}"
    return " or ".join("None" if kind is NoneType else kind.__name__ for kind in get_args(hint) or (hint,))
