"""Batches of a caller's prompts: as they are given, and while they are answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

from quire.frontend.input_processor import PreparedRequest, Prompt
from quire.types.errors import BatchError, GenerationError, QuireError, RefusedRequestError, RequestError
from quire.types.outputs import RequestOutput

T = TypeVar("T")
R = TypeVar("R")


class Batch:
    """Requests that are answered together: which are waited for, and what came of the others."""

    def __init__(self, count: int) -> None:
        self.waiting: dict[str, tuple[int, int]] = {}  # by id: which one it is, and its prompt's tokens
        self.num_tokens = 0  # of the prompts that are waited for
        self._outputs: list[RequestOutput | None] = [None] * count
        self._errors: dict[int, QuireError] = {}

    def add(self, index: int, request: PreparedRequest) -> None:
        length = len(request.prompt_token_ids)
        self.waiting[request.request_id] = index, length
        self.num_tokens += length

    def fail(self, index: int, error: QuireError) -> None:
        self._errors[index] = error.with_traceback(None)

    def end(self, request_id: str, take: Callable[[], RequestOutput | None]) -> None:
        """A request was heard of for the last time: `take` gives its output, or raises why there is none."""
        index, length = self.waiting.pop(request_id)
        self.num_tokens -= length
        try:
            self._outputs[index] = take()
        except (GenerationError, RefusedRequestError) as error:
            self.fail(index, error)

    def results(self) -> list[RequestOutput]:
        """In the order of the requests. Of a single request that failed its own error, of several BatchError."""
        if self._errors:
            errors, self._errors = self._errors, {}
            try:
                raise errors[0] if len(self._outputs) == 1 else BatchError(self._outputs, errors)
            finally:
                del errors  # this frame is in the error's traceback: together they would keep the request alive
        return [output for output in self._outputs if output is not None]


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
