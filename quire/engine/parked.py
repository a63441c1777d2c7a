"""ParkedRequests: the one place for requests that wait for something, such as a grammar, while others pass them.

What they wait for are conditions. A request that is ready goes to the scheduler; what its conditions hold for it is
given back when it ends. Knows requests; knows no scheduler and nothing of what conditions do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from quire.types.errors import DuplicateRequestError, RequestError
from quire.types.outputs import EngineOutput
from quire.types.request import EngineRequest
from quire.utils.log import get_logger

logger = get_logger(__name__)


class Condition(Protocol):
    """Something that requests may have to wait for. All methods are called on the engine's thread; none blocks."""

    name: str

    def applies(self, request: EngineRequest) -> bool:
        """Whether this request needs it."""

    def begin(self, request: EngineRequest) -> Future[Any]:
        """Start what the request needs; the future is completed on any thread, with a RequestError if it is wrong."""

    def take(self, request: EngineRequest, found: Any) -> None:
        """What `begin` promised is there: hold it for the request until `forget`. RequestError if it does not fit."""

    def forget(self, request_id: str) -> None:
        """The request has ended, whether it ever ran or not."""

    def shutdown(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Parked:
    request: EngineRequest
    waits_for: set[str]  # names of conditions


class ParkedRequests:
    """Everything but the completion of futures happens on the engine's thread."""

    def __init__(self, conditions: Sequence[Condition]) -> None:
        self.on_news: Callable[[], None] = lambda: None
        """Called on some thread whenever `take_ready` has something new to say."""
        self.on_taken: Callable[[str, str], None] = lambda request_id, condition: None
        """Told, in `take_ready`, of each request that gets what it waited for, and the name of that condition."""
        self.conditions = conditions
        self._parked: dict[str, _Parked] = {}
        self._admitted: set[str] = set()  # requests that run, and that conditions hold something for
        self._news: deque[tuple[_Parked, Condition, Future[Any]]] = deque()

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._parked

    def __len__(self) -> int:
        return len(self._parked)

    @property
    def request_ids(self) -> Iterable[str]:
        return self._parked.keys()

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def waits(self) -> Iterator[tuple[EngineRequest, set[str]]]:
        """The parked requests, each with the names of the conditions that it waits for."""
        return ((parked.request, parked.waits_for) for parked in self._parked.values())

    def must_wait(self, request: EngineRequest) -> bool:
        """Whether a request has to be parked. DuplicateRequestError if one of this name is."""
        if request.request_id in self._parked:
            raise DuplicateRequestError(request.request_id)
        return any(condition.applies(request) for condition in self.conditions)

    def park(self, request: EngineRequest) -> None:
        """Keep a request until everything that it needs is there."""
        needed = [condition for condition in self.conditions if condition.applies(request)]
        parked = self._parked[request.request_id] = _Parked(request, {condition.name for condition in needed})
        for condition in needed:
            condition.begin(request).add_done_callback(partial(self._tell, parked, condition))

    def take_ready(self) -> tuple[list[EngineRequest], list[EngineOutput]]:
        """The requests that may run now, in the order in which they became ready; the ends of those that cannot."""
        ready: list[EngineRequest] = []
        refused: list[EngineOutput] = []
        while self._news:
            parked, condition, future = self._news.popleft()
            request = parked.request
            if self._parked.get(request.request_id) is not parked:
                continue  # it has ended meanwhile
            self.on_taken(request.request_id, condition.name)
            try:
                condition.take(request, future.result())
            except Exception as error:  # whatever a condition raises is this request's end, and nobody else's
                self._end(request.request_id)
                refused.append(_why(request.request_id, condition.name, error))
                continue
            parked.waits_for.remove(condition.name)
            if not parked.waits_for:
                del self._parked[request.request_id]
                self._admitted.add(request.request_id)
                ready.append(request)
        return ready, refused

    def abort(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """End requests; those that are parked are answered here."""
        outputs: list[EngineOutput] = []
        for request_id in request_ids:
            if request_id in self._parked:
                outputs.append(EngineOutput(request_id, [], finish_reason="abort"))
                self._end(request_id)
            elif request_id in self._admitted:
                self._end(request_id)
        return outputs

    def note_ends(self, outputs: Iterable[EngineOutput]) -> None:
        """Give back what is held for requests that these outputs end."""
        if self._admitted:
            for output in outputs:
                if output.finish_reason is not None and output.request_id in self._admitted:
                    self._end(output.request_id)

    def shutdown(self) -> None:
        for condition in self.conditions:
            condition.shutdown()

    def check_integrity(self, running: Iterable[str]) -> None:
        """Raise AssertionError if a request is here and among the scheduler's, or waits for nothing. For tests."""
        names = {condition.name for condition in self.conditions}
        assert all(parked.waits_for and parked.waits_for <= names for parked in self._parked.values())
        assert self._parked.keys().isdisjoint(running), "a request is parked and runs"
        assert self._admitted <= set(running), "something is held for a request that has ended"

    def _tell(self, parked: _Parked, condition: Condition, future: Future[Any]) -> None:
        self._news.append((parked, condition, future))
        self.on_news()

    def _end(self, request_id: str) -> None:
        self._parked.pop(request_id, None)
        self._admitted.discard(request_id)
        for condition in self.conditions:
            condition.forget(request_id)


def refusal(request_id: str, error: RequestError) -> EngineOutput:
    """The only output of a request that is wrong."""
    return EngineOutput(request_id, [], finish_reason="error", error=str(error), error_field=error.field)


def _why(request_id: str, name: str, error: Exception) -> EngineOutput:
    if isinstance(error, RequestError):
        return refusal(request_id, error)
    logger.error("request %s waited for its %s in vain", request_id, name, exc_info=error)
    return EngineOutput(request_id, [], finish_reason="error", error=f"its {name} cannot be had: {error!r}")
