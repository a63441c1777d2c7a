"""How the time of a step is shared between prompts: bounded while anybody would be delayed, the shortest first."""

from __future__ import annotations

from typing import NamedTuple

from quire.sched.request import OrderKey, Request
from quire.sched.shares import MOST_PASSED, TokenShares
from quire.sched.state import SchedulerState, StepDraft
from quire.sched.step_times import StepTimes, StepWork

_ALONE = 0.3  # seconds of a step that delays nobody: whoever comes next waits for it
_STUB = 1.25  # a lone prompt is finished if it is longer than fits by this much
_LEAST = 16  # tokens; a smaller part of a prompt is not worth its row in a step
_OLDEST_SHARE = 0.25  # of all prompt tokens, those that the oldest prompt gets at least
_PROBED = 16  # one in this many steps that are cut to their target is cut to half, to see what that saves
_FLAT, _STEEP = 0.8, 0.65  # parts of the time that half of the tokens take: too much, and fair
_FILLED = 0.2  # part of the time for prompts that a step uses which gives others their first token
_LOOK_AHEAD = 8  # waiting requests that room is kept for
_FOR_MODE = {"interactivity": (1.5, 1.0)}  # stretch and patience


class _Prompt(NamedTuple):
    request: Request
    start: int  # computed tokens
    wanted: int  # tokens that are left


class _Floor:
    """The smallest part of a prompt worth a step, found by comparing steps with halves of them.

    Where attention leaves part of a device idle, half of the tokens of a long prompt take nearly as long as all.
    """

    def __init__(self) -> None:
        self.tokens = _LEAST
        self._before = (StepWork(0), 0.0)
        self._was_flat = False

    def measured(self, work: StepWork, seconds: float, decodes: float) -> None:
        """A step with prompts took `seconds`, of which `decodes` for other rows."""
        (before, before_seconds), self._before = self._before, (work, seconds)
        tokens, whole = work.prompt_tokens, before.prompt_tokens
        if not 0.4 * whole < tokens < 0.6 * whole or not 0.9 < work.pairs * whole / (before.pairs * tokens) < 1.1:
            return
        part = (seconds - decodes) / max(before_seconds - decodes, 1e-9)
        if part > _FLAT and self._was_flat:
            self.tokens = 2 * whole
        elif part < _STEEP:
            self.tokens = max(_LEAST, self.tokens // 2)
        self._was_flat = part > _FLAT


class TimeShares(TokenShares):
    """Decodes come first; prompts get what is left of the target time, those with the fewest tokens left first.

    Nobody starves: the oldest prompt gets a quarter of all prompt tokens, counted over steps, and requests that
    memory is short for are not passed. Requests of a better priority always come before others.
    """

    def __init__(self, times: StepTimes, target: float, stretch: float = 2.0, patience: float = 4.0) -> None:
        """`target`: seconds of a step. One may take `stretch` times as long as its decodes alone, if that is more.

        Where a smaller part of a prompt would hardly be faster, a step may take `patience` times its target.
        """
        self._times = times
        self._target = target
        self._stretch = stretch
        self._patience = patience
        self._credit = 0.0  # prompt tokens that the oldest prompt is behind its share
        self._oldest: OrderKey | None = None
        self._floor = _Floor()
        self._num_cut = 0  # steps whose first prompt did not fit
        self._last_cut = 4 * _LEAST  # tokens that it got
        # Of the step that is being planned:
        self._limit = 0.0  # seconds
        self._target_now = 0.0
        self._work = StepWork(0)
        self._known_room = StepWork(0), 0  # of a step with this work
        self._budget = 0
        self._cap = 0

    def measured(self, work: StepWork, seconds: float) -> None:
        self._times.measured(work, seconds)
        if work.prompt_tokens:
            self._floor.measured(work, seconds, self._times.of(StepWork(work.rows)))

    def begin(self, state: SchedulerState, step: StepDraft) -> None:
        """Decide what every prompt gets; of waiting ones only the first few are looked at."""
        if not state.prefilling and not (state.waiting and state.rows.free):
            return
        self._begin_step(state, step)
        prompts = [
            _Prompt(request, request.num_computed_tokens, request.num_tokens - request.num_computed_tokens)
            for request in state.prefilling
        ]
        prompts += self._waiting(state)
        if not prompts:
            return
        if len(prompts) == 1 and not self._work.rows:
            self._cap = self._budget
        oldest = min(prompts, key=lambda prompt: prompt.request.key)
        if oldest.request.key != self._oldest:
            self._oldest, self._credit = oldest.request.key, 0.0
        prompts.sort(key=lambda prompt: (prompt.request.key[0], prompt.wanted, prompt.request.key))
        if self._credit > 0.0:
            prompts.remove(oldest)
            prompts.insert(self._num_short(prompts), oldest)
        decodes = self._work
        self._allot(step, prompts)
        total = self._work.prompt_tokens
        self._credit = max(self._credit + _OLDEST_SHARE * total - step.shares[oldest.request], -float(total))
        # Waiting requests are counted when they start: not all of them may.
        self._work = decodes
        self._budget += total
        for prompt in prompts:
            if prompt.request in state.prefilling:
                self._take(prompt.start, step.shares[prompt.request])

    def of_running(
        self, state: SchedulerState, step: StepDraft, request: Request, wanted: int, num_behind: int
    ) -> int:
        return min(step.shares.get(request, wanted), step.budget)

    def may_start(self, state: SchedulerState, step: StepDraft, request: Request) -> bool:
        """Whether a waiting request is to be started now. Others may pass it if not."""
        if not step.requests or state.blocked == request.key:
            return True
        if request in step.shares:
            return step.shares[request] > 0
        room = self._room()
        start = _cached(state, request) if room else 0
        wanted = request.num_tokens - start
        return wanted <= room and self._fitting(start, wanted, self._limit) >= wanted

    def most_passed(self) -> int:
        """Those that room was kept for come first in the queue; without time for a token nobody else can start."""
        return MOST_PASSED if self._room() else _LOOK_AHEAD

    def of_new(self, state: SchedulerState, step: StepDraft, request: Request, start: int, wanted: int) -> int:
        count = self._fitting(start, wanted, self._limit)
        if count < wanted:
            count = max(min(count, step.shares.get(request, 0)), min(_LEAST, wanted))
        count = min(count, step.budget)
        self._take(start, count)
        return count

    def _begin_step(self, state: SchedulerState, step: StepDraft) -> None:
        num_rows = len(state.running) - len(state.prefilling)
        self._work = StepWork(num_rows)
        self._target_now = max(self._target, self._stretch * self._times.of(self._work))
        self._limit = self._target_now if num_rows else max(self._target_now, _ALONE)
        self._budget = max(1, step.budget - num_rows)
        self._cap = min(self._budget, state.limits.long_prefill_token_threshold)

    def _waiting(self, state: SchedulerState) -> list[_Prompt]:
        """The waiting requests that room is kept for: none if they could not start anyway."""
        if not state.rows.free:
            return []
        first = state.waiting.first(_LOOK_AHEAD)
        if state.blocked is not None:
            if any(request.key == state.blocked for request in first):
                return []
            state.blocked = None  # it was aborted
        found = []
        for request in first:
            if not request.num_pending:
                start = _cached(state, request)
                found.append(_Prompt(request, start, request.num_tokens - start))
        return found

    def _num_short(self, prompts: list[_Prompt]) -> int:
        """How many of the first prompts a small part of the step catches up: the oldest's turn comes after them."""
        work, limit = self._work, self._partly_filled()
        for number, (_, start, wanted) in enumerate(prompts):
            work = self._times.plus(work, start, wanted)
            if wanted > self._cap or self._times.of(work) > limit:
                return number
        return len(prompts)

    def _partly_filled(self, times: float = 1.0) -> float:
        """Seconds of a step that others wait for: its decodes, and some of its time for prompts."""
        decodes = self._times.of(StepWork(self._work.rows))
        return decodes + times * _FILLED * max(0.0, self._target_now - decodes)

    def _allot(self, step: StepDraft, prompts: list[_Prompt]) -> None:
        """Share the step's time between prompts in this order; every one has an entry in step.shares afterwards."""
        some_catch_up = False
        for request, start, wanted in prompts:
            count = self._fitting(start, wanted, self._limit)
            if len(prompts) == 1 and not self._work.rows and count < wanted <= min(_STUB * count, self._budget):
                count = wanted
            most = min(wanted, self._budget, self._cap)
            if count < most and not self._work.prompt_tokens:
                count = self._cut(start, most, count)
            if count < wanted and some_catch_up:
                # Others get their first token from this step: it is not filled up.
                filled = 2.0 if self._credit > 0.0 and request.key == self._oldest else 1.0
                count = self._fitting(start, wanted, self._partly_filled(filled))
            if count < min(wanted, _LEAST):
                # Somebody must go on, however slow a token is.
                count = 0 if self._work.prompt_tokens else min(wanted, _LEAST, self._budget)
            step.shares[request] = count
            self._take(start, count)
            some_catch_up |= count == wanted

    def _cut(self, start: int, most: int, count: int) -> int:
        """How many tokens the first prompt of a step gets of the `count` that are predicted to fit."""
        # What was never measured is not believed, and what is not faster is not made smaller.
        bearable = self._fitting(start, most, self._patience * self._target_now)
        count = min(max(count, min(self._floor.tokens, bearable)), 2 * self._last_cut + _LEAST)
        self._last_cut = count
        self._num_cut += 1
        if self._num_cut % _PROBED == 0:
            self._limit = 0.0  # for others in this step
            return count // 2
        return count

    def _fitting(self, start: int, wanted: int, limit: float) -> int:
        """How many of `wanted` tokens fit, besides what is planned, into `limit` seconds and the budget."""
        most = min(wanted, self._budget, self._cap)
        work = self._work
        if self._times.of(self._times.plus(work, start, most)) <= limit:
            return most
        return min(most, self._times.fitting(work, start, limit))

    def _room(self) -> int:
        """A number of tokens of a new prompt that is not less than those that fit into the step; 0 if it is full."""
        work, room = self._known_room
        if work is not self._work:
            fits = self._fitting(0, 1, self._limit) == 1
            room = min(self._budget, self._cap, self._times.most(self._work, self._limit)) if fits else 0
            self._known_room = self._work, room
        return room

    def _take(self, start: int, count: int) -> None:
        if count:
            self._work = self._times.plus(self._work, start, count)
            self._budget = max(0, self._budget - count)


def make_shares(target: float, mode: str, times: StepTimes) -> TokenShares:
    """The rule for a mode and a target in seconds, 0 for none."""
    return TimeShares(times, target, *_FOR_MODE.get(mode, ())) if target else TokenShares()


def _cached(state: SchedulerState, request: Request) -> int:
    """How many tokens of a waiting request the prefix cache has now."""
    return state.kv.find_prefix(request.kv, request.token_ids).num_tokens if request.may_reuse_prefix else 0
