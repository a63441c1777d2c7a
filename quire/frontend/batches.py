"""Batches as callers give them: one prompt or many, one value for all requests or one each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

from quire.frontend.input_processor import Prompt
from quire.types.errors import BatchError, QuireError, RequestError
from quire.types.outputs import RequestOutput

T = TypeVar("T")
R = TypeVar("R")


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as many: a list of integers is one prompt, any other list is a list of prompts."""
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Sequence):
        return [cast(Prompt, prompts)]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [cast(Prompt, prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def spread(value: T | Sequence[T] | None, count: int, field: str, default: T) -> list[T]:
    """One value for all requests, or one each."""
    if value is None:
        return [default] * count
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{field} has {len(value)} entries for {count} requests; give one, or one each", field)
    return list(value)


def of_each(values: Sequence[T], function: Callable[[T], R]) -> list[R]:
    """What the function gives for each value; for neighbours that are one object it is called once."""
    found: list[R] = []
    for index, value in enumerate(values):
        found.append(found[-1] if index and value is values[index - 1] else function(value))
    return found


def batch_error(outputs: list[RequestOutput | None], errors: dict[int, QuireError]) -> QuireError:
    """The error to raise for a batch: of a single request its own, else one that carries everything."""
    return errors.pop(0) if len(outputs) == 1 else BatchError(outputs, errors)
