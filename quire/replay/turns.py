"""A trace as turns: what one call of EngineCore.step() was given, and what it planned and got. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from quire.engine.trace.records import (
    Begin,
    Ended,
    Failed,
    Finished,
    Planned,
    Ready,
    Record,
    Took,
    TookRedacted,
)


@dataclass
class Turn:
    took: list[Took | TookRedacted] = field(default_factory=list)  # before the step
    begin: float | None = None
    ready: list[tuple[str, str]] = field(default_factory=list)  # request and condition, in order
    planned: list[Planned] = field(default_factory=list)
    end: Finished | Failed | None = None
    is_last: bool = False  # the engine stopped in good order after it


def turns(records: Iterable[Record]) -> Iterator[Turn]:
    """The last turn of a trace that a crash ended has plans and no end."""
    turn = Turn()
    for record in records:
        match record:
            case Took() | TookRedacted():
                if turn.begin is not None:
                    yield turn
                    turn = Turn()
                turn.took.append(record)
            case Begin():
                if turn.begin is not None:
                    yield turn
                    turn = Turn()
                turn.begin = record.at
            case Ready():
                turn.ready.append((record.request_id, record.condition))
            case Planned():
                turn.planned.append(record)
            case Finished() | Failed():
                turn.end = record
            case Ended():
                turn.is_last = True
    if turn.took or turn.begin is not None or turn.is_last:
        yield turn


def recorded_outputs(records: Iterable[Record]) -> dict[str, list[int]]:
    """The tokens that each request was given. Steps in flight behind a request's end may add some that it was not.

    Of a trace whose beginning is gone, these are the requests that started in what is left.
    """
    owners: dict[int, str] = {}
    rows: list[int] = []
    plans: dict[int, list[str | None]] = {}  # step in flight -> requests of its rows
    outputs: dict[str, list[int]] = {}
    for record in records:
        if isinstance(record, Planned):
            owners.update(record.starts)
            rows = rows if record.rows is None else record.rows
            plans[record.step_id] = [owners.get(row) for row in rows]
        elif isinstance(record, Finished):
            if (names := plans.pop(record.step_id, None)) is None:
                continue
            for name, token_ids in zip(names, record.token_ids, strict=True):
                if name is not None:
                    outputs.setdefault(name, []).extend(token_ids)
    return outputs
