"""What crosses between a client, its engine and its worker is built once and only read afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

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
