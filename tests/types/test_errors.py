"""The exception tree: one root, and the standard types where a caller may expect them."""

from __future__ import annotations

import inspect
import pickle

import pytest

from quire.types import errors
from quire.types.errors import BatchError, EngineDeadError, GenerationError, QuireError, RequestError

CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", CLASSES)
def test_all_are_quire_errors_and_say_when_they_are_raised(kind: type[Exception]) -> None:
    assert issubclass(kind, QuireError)
    assert inspect.getdoc(kind)


def test_wrong_values_are_value_errors() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.RequestError, ValueError)
    assert not issubclass(errors.EngineError, ValueError)


def test_a_batch_error_carries_everything() -> None:
    failed = {2: RequestError("the prompt is empty", "prompt"), 1: EngineDeadError("gone")}
    error = BatchError(["first", None, None], failed)
    assert str(error) == "2 of 3 requests failed, the others are in .outputs; request 1: gone"
    assert (error.outputs, error.errors, error.field) == (["first", None, None], failed, None)
    alone = BatchError([None], {0: failed[2]})
    assert alone.field == "prompt"
    assert str(alone).startswith("1 of 1 requests failed; request 0: ")


def test_a_generation_error_names_its_request() -> None:
    error = GenerationError("r7", "no token may be chosen")
    assert (str(error), error.request_id) == ("request r7 failed: no token may be chosen", "r7")


@pytest.mark.parametrize("error", [RequestError("x", "field"), EngineDeadError("x")])
def test_errors_survive_another_process(error: QuireError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
