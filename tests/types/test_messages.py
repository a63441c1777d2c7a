"""What crosses between a client, its engine and its worker, or to a caller, is built once and only read later."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator

import msgspec

import quire.types
from quire.types.messages import FromEngine, ToEngine
from quire.types.step import StepPlan, StepResult


def structs_in(kind: object, seen: set[int]) -> Iterator[type[msgspec.Struct]]:
    """All structs that a type is made of."""
    if id(kind) in seen:
        return
    seen.add(id(kind))
    if isinstance(kind, msgspec.inspect.StructType):
        yield kind.cls
        for field in kind.fields:
            yield from structs_in(field.type, seen)
    for name in ("types", "item_types"):
        for part in getattr(kind, name, ()):
            yield from structs_in(part, seen)
    for name in ("item_type", "key_type", "value_type"):
        yield from structs_in(getattr(kind, name, None), seen)


def test_messages_are_frozen_to_the_last_part() -> None:
    found = {
        struct
        for kind in (ToEngine, FromEngine, StepPlan, StepResult)
        for struct in structs_in(msgspec.inspect.type_info(kind), set())
    }
    assert {"EngineRequest", "SamplingParams", "TokenLogprobs", "EngineStats", "Reply", "RowStart"} <= {
        s.__name__ for s in found
    }
    assert [struct.__name__ for struct in found if not struct.__struct_config__.frozen] == []


def test_all_types_of_the_package_are_frozen() -> None:
    modules = [
        importlib.import_module(f"quire.types.{found.name}") for found in pkgutil.iter_modules(quire.types.__path__)
    ]
    own = {each for module in modules for each in vars(module).values() if isinstance(each, type)}
    structs = [each for each in own if issubclass(each, msgspec.Struct) and each is not msgspec.Struct]
    plain = [each for each in own if dataclasses.is_dataclass(each)]
    assert {"RequestOutput", "CompletionOutput", "BeamSearchOutput", "Logprob"} <= {each.__name__ for each in structs}
    mutable = [each.__name__ for each in structs if not each.__struct_config__.frozen]
    mutable += [each.__name__ for each in plain if not each.__dataclass_params__.frozen]
    assert mutable == []
