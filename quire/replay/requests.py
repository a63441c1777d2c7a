"""Runs some of a trace's requests by themselves, and finds the smallest set that still goes wrong. Imports no torch.

A request gives the same tokens whatever runs beside it, so each can be compared with what was recorded of it,
although the steps are others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.engine.control import obey
from quire.engine.core import EngineCore
from quire.engine.trace.records import Took
from quire.replay.trace import Trace
from quire.replay.turns import recorded_outputs, turns
from quire.types.errors import EngineDeadError, TraceError
from quire.types.messages import Command
from quire.types.request import EngineRequest

_PARKED_NAP = 0.001  # seconds between two looks whether a grammar is compiled


@dataclass
class RecordedRequest:
    request: EngineRequest
    token_ids: list[int] = field(default_factory=list)  # that it was given, as far as the trace goes


@dataclass(frozen=True)
class Trouble:
    """What went wrong in a run of some requests."""

    request_id: str
    detail: str


def recorded_requests(trace: Trace) -> list[RecordedRequest]:
    """The requests of a trace in the order of their arrival."""
    outputs = recorded_outputs(trace.records())
    return [
        RecordedRequest(took.message, outputs.get(took.message.request_id, []))
        for turn in turns(trace.records())
        for took in turn.took
        if isinstance(took, Took) and isinstance(took.message, EngineRequest)
    ]


def commands(trace: Trace) -> list[Command]:
    """What the engine was told beside requests, such as its vocabulary."""
    return [
        took.message
        for turn in turns(trace.records())
        for took in turn.took
        if isinstance(took, Took) and isinstance(took.message, Command)
    ]


class RequestRuns:
    """Runs sets of requests on one core, one set after the other."""

    def __init__(self, core: EngineCore, beside: Sequence[Command] = ()) -> None:
        self._core = core
        for command in beside:
            obey(core, command)

    def run(self, chosen: Sequence[RecordedRequest]) -> Trouble | None:
        """Run requests all at once; the first whose step fails, or whose tokens are not the recorded ones."""
        self._core.scheduler.reset_prefix_cache()
        given: dict[str, list[int]] = {one.request.request_id: [] for one in chosen}
        try:
            return self._run(chosen, given)
        except EngineDeadError as error:
            return Trouble(", ".join(given), str(error))
        finally:
            self._core.abort(given)

    def _run(self, chosen: Sequence[RecordedRequest], given: dict[str, list[int]]) -> Trouble | None:
        for one in chosen:
            for output in self._core.add_request(one.request):
                return Trouble(output.request_id, f"it is refused: {output.error}")
        while self._core.has_unfinished():
            if not self._core.has_work():
                time.sleep(_PARKED_NAP)
                continue
            for output in self._core.step().outputs:
                given[output.request_id] += output.token_ids
                if output.error is not None:
                    return Trouble(output.request_id, output.error)
        return next((trouble for one in chosen if (trouble := _compare(one, given))), None)


def _compare(one: RecordedRequest, given: dict[str, list[int]]) -> Trouble | None:
    """A crash may have cut the recorded tokens short; tokens behind an end were recorded and not given."""
    name = one.request.request_id
    pairs = enumerate(zip(one.token_ids, given[name], strict=False))
    return next(
        (Trouble(name, f"output token {at} was {was} and is now {now}") for at, (was, now) in pairs if was != now),
        None,
    )


def minimize(
    requests: Sequence[RecordedRequest],
    goes_wrong: Callable[[Sequence[RecordedRequest]], bool],
    say: Callable[[str], None] = lambda line: None,
) -> list[RecordedRequest]:
    """The smallest set that still goes wrong: without any one of them it does not. TraceError if all together do not.

    Delta debugging: halves are tried first, then ever smaller parts are left out.
    """
    left = list(requests)
    if not goes_wrong(left):
        raise TraceError("the requests of this trace run without a failure and without a difference")
    parts = 2
    while len(left) > 1:
        size = -(-len(left) // parts)
        pieces = [left[begin : begin + size] for begin in range(0, len(left), size)]
        rests = [[one for one in left if one not in piece] for piece in pieces]
        smaller = next((s for s in (*pieces, *rests) if 0 < len(s) < len(left) and goes_wrong(s)), None)
        if smaller is not None:
            parts = 2 if smaller in pieces else max(2, parts - 1)
            left = smaller
            say(f"{len(left)} requests still go wrong")
        elif size == 1:
            break
        else:
            parts = min(len(left), parts * 2)
    return left
