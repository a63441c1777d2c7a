"""Recorder: what is remembered of steps while somebody looks at the console.

`CONSOLE` is the control verb that looks: the first look begins the recording, one that says `stop` ends it.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from itertools import islice
from typing import TYPE_CHECKING

from quire.engine.control import Verb
from quire.engine.step_log import NO_LOG, StepLog
from quire.kv.view import EvictedHashes, PoolMap, prefix_tree
from quire.sched.request import Request
from quire.sched.view import MOST_WAITING, request_views
from quire.types.console import ConsoleQuery, EngineView, EventKind, EventView, RequestView, StepView
from quire.types.request import EngineRequest
from quire.types.step import StepPlan, StepResult

if TYPE_CHECKING:
    from quire.engine.core import EngineCore

_MOST_STEPS = 1024  # remembered
_MOST_EVENTS = 4096
_MOST_OWNED = 6144  # blocks whose users are noted in one look
_TREE_EVERY = 6  # looks


class Recorder(StepLog):
    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._state = core.scheduler.state
        self._steps: deque[StepView] = deque(maxlen=_MOST_STEPS)
        self._events: deque[EventView] = deque(maxlen=_MOST_EVENTS)
        self._num_events = 0
        self._num_preemptions = self._state.num_preemptions
        self._preempted: dict[str, int] = {}  # waiting request -> its preemptions, as told
        self._misses: Counter[str] = Counter()
        self._evicted = EvictedHashes()
        kv = core.scheduler.kv
        kv.listeners.append(self._evicted.note)
        self._maps = [(pool, PoolMap(pool)) for pool in kv.pools]
        self._num_looks = 0
        self._next_owner = 0
        self._tree = prefix_tree({})

    def planned(self, plan: StepPlan) -> None:
        requests = self._state.in_flight[-1].requests
        if plan.starts:
            cached = {start.row: start.num_computed_tokens for start in plan.starts}
            for request in requests:
                if request.row in cached:
                    self._note_start(request, cached[request.row])
        if len(plan.rows) != sum(plan.num_tokens):
            for request, count in zip(requests, plan.num_tokens, strict=True):
                if count > 1:
                    self._tell(request.request_id, "chunk", count, request.num_computed_tokens)
        if self._state.num_preemptions != self._num_preemptions:
            self._note_preemptions()

    def finished(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        num_tokens = sum(plan.num_tokens)
        prompts = 0 if num_tokens == len(plan.rows) else sum(count for count in plan.num_tokens if count > 1)
        self._steps.append(
            StepView(plan.step_id, time.time(), seconds, len(plan.rows), num_tokens, prompts, result.way)
        )

    def stop(self) -> None:
        self._core.scheduler.kv.listeners.remove(self._evicted.note)

    def view(self, query: ConsoleQuery) -> EngineView:
        self._note_owners()
        if self._num_looks % _TREE_EVERY == 0:
            # Every pool has the same hashes in its first group.
            self._tree = prefix_tree(self._core.scheduler.kv.pools[0].cached[0])
        self._num_looks += 1
        wall = time.time() - time.monotonic()
        requests = request_views(self._state, lambda at: at + wall)
        parked = [self._parked(*one, wall) for one in islice(self._core.parked.waits(), MOST_WAITING)]
        nodes, num_more = self._tree
        memory = self._core.memory
        return EngineView(
            time.time(),
            requests + parked,
            max(0, len(self._state.waiting) - MOST_WAITING) + len(self._core.parked) - len(parked),
            [step for step in self._steps if step.id > query.after_step],
            [event for event in self._events if event.number > query.after_event],
            [pool_map.view() for _, pool_map in self._maps],
            nodes,
            num_more,
            dict(self._misses),
            memory.lines,
            memory.supply,
        )

    def _parked(self, request: EngineRequest, waits_for: set[str], wall: float) -> RequestView:
        num_tokens = len(request.token_ids)
        return RequestView(
            request.request_id,
            "parked",
            request.arrival_time + wall,
            num_tokens - request.num_given_outputs,
            num_tokens,
            0,
            why=f"waits for its {' and '.join(sorted(waits_for))}",
            priority=request.priority,
            grammar=request.grammar is not None,
        )

    def _note_start(self, request: Request, cached: int) -> None:
        known = len(request.token_ids)
        self._tell(request.request_id, "resumed" if request.num_preemptions else "started", cached, known)
        if request.num_preemptions:
            return
        kv = self._core.scheduler.kv
        block_size = kv.block_size
        if without_state := request.num_without_state:
            self._misses["cached, but without a state of recurrent layers to go on from"] += without_state
        cached += without_state
        missed = (known - 1) // block_size * block_size - cached
        if known <= block_size:
            self._misses["prompt shorter than one block"] += known
        elif missed > 0:
            why = kv.why_missed(request.kv, cached, self._evicted)
            self._misses[why if request.may_reuse_prefix else "its prompt has to be computed as a whole"] += missed

    def _note_preemptions(self) -> None:
        self._num_preemptions = self._state.num_preemptions
        waiting = {r.request_id: r.num_preemptions for r in self._state.waiting if r.num_preemptions}
        for name, count in waiting.items():
            if self._preempted.get(name) != count:
                self._tell(name, "preempted", count)
        self._preempted = waiting

    def _note_owners(self) -> None:
        """Which requests use which blocks: as many requests as there is time for, the others at the next look."""
        running, left = self._state.running, _MOST_OWNED
        kv = self._core.scheduler.kv
        for index in range(len(running)):
            request = running[(self._next_owner + index) % len(running)]
            for pool, pool_map in self._maps:
                pool_map.own(request.row, kv.blocks_of(request.kv, pool))
            left -= request.capacity // kv.block_size
            if left < 0:
                self._next_owner = (self._next_owner + index + 1) % len(running)
                return

    def _tell(self, name: str, kind: EventKind, value: int = 0, total: int = 0) -> None:
        self._events.append(EventView(self._num_events, time.time(), name, kind, value, total))
        self._num_events += 1


def look(core: EngineCore, query: ConsoleQuery) -> EngineView:
    watch = core.watch
    if query.stop:
        if isinstance(watch, Recorder):
            watch.stop()
        core.watch = NO_LOG
        return EngineView()
    if not isinstance(watch, Recorder):
        watch = core.watch = Recorder(core)
    return watch.view(query)


CONSOLE = Verb(look, ConsoleQuery, EngineView)
"""Show the engine as it is between two steps, and what happened since the last look."""
