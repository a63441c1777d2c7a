"""Drafts: guesses at what requests will say next, verified by the steps that sample it.

A draft holds exactly if it is the token that would be sampled without it, so drafts change how many tokens a step
gives and never which.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from quire.sched.draft_lengths import EveryDraft, Offer, Track
from quire.sched.request import Request, Status
from quire.sched.state import InFlight, SchedulerState, StepDraft
from quire.types.sampling import SamplingParams
from quire.types.step import StepResult


class NoDrafts:
    """Nobody speculates."""

    def open(self, request: Request) -> None:
        """A request begins."""

    def close(self, request: Request) -> None:
        """A request ends, in whatever way."""

    def speculates(self, request: Request) -> bool:
        """Whether the request may get drafts, so that nobody knows how many tokens a step gives it."""
        return False

    def add_drafts(self, state: SchedulerState, step: StepDraft) -> None:
        """Give drafts to rows of a step that is planned but for them."""

    def verified(self, state: SchedulerState, step: InFlight, result: StepResult, seconds: float) -> None:
        """The result of a step was applied; it kept the device for `seconds`, 0 if that is not known."""


class Drafter(ABC):
    """Guesses tokens. A wrong guess costs the time to compute it, nothing else."""

    name: ClassVar[str]
    default_tokens: ClassVar[int] = 4
    """Most drafts of a request in a step, if the settings do not say."""
    proposes: ClassVar[bool] = False
    """Whether its guesses come from the worker, with the result of the step that was asked for them."""
    is_certain: ClassVar[bool] = False
    """Whether its guesses hold. As the worker's, they are looked for in every step, also where others are not."""

    def open(self, request: Request) -> bool:
        """A request begins. False if there will never be a guess for it: then it is not closed either."""
        return True

    def close(self, request: Request) -> None:
        """A request that was opened ends, in whatever way."""
        return None

    def take(self, request: Request, tokens: list[int]) -> None:
        """The worker proposes `tokens` behind the known ones of a request."""
        return None

    @abstractmethod
    def propose(self, request: Request, num_in_flight: int, limit: int) -> list[int]:
        """At most `limit` tokens that may follow the known ones and those in flight, if all of these hold."""


class Drafts(NoDrafts):
    """Rows that sample verify drafts with what is left of the step: nobody waits or is preempted for one.

    Of several drafters the first that has a guess is asked; how many of its tokens are verified, `lengths` decides.
    """

    def __init__(self, *drafters: Drafter, most: int | None = None, lengths: EveryDraft | None = None) -> None:
        """`most`: drafts of a request in a step, whoever guesses; None: each drafter's own number."""
        self._drafters = {drafter: most or drafter.default_tokens for drafter in drafters}
        self._lengths = lengths or EveryDraft()
        self._requests: dict[Request, tuple[list[Drafter], Track]] = {}
        self._proposer = next((drafter for drafter in drafters if drafter.proposes), None)
        self._rests = False  # the next step neither verifies nor proposes, so that its time can be compared with

    def open(self, request: Request) -> None:
        params = request.engine_request.params
        if not isinstance(params, SamplingParams) or not params.speculate or params.return_routed_experts:
            return
        drafters = [drafter for drafter in self._drafters if drafter.open(request)]
        if drafters:
            self._requests[request] = drafters, Track()

    def close(self, request: Request) -> None:
        drafters, _ = self._requests.pop(request, ((), None))
        for drafter in drafters:
            drafter.close(request)

    def speculates(self, request: Request) -> bool:
        return request in self._requests

    def add_drafts(self, state: SchedulerState, step: StepDraft) -> None:
        if not self._requests:
            return
        offers: list[Offer] = []
        ready: list[Offer] = []  # proposed by the worker: how many was decided when they were asked for
        ahead: list[tuple[int, Track]] = []
        for index, request in enumerate(step.requests):
            speculated = self._requests.get(request)
            if speculated is None or index in step.chunks:
                continue
            drafters, track = speculated
            asks = self._lengths.may_ask(track, step)
            asked = drafters if asks else [one for one in drafters if one.proposes or one.is_certain]
            room = min(step.budget, request.max_tokens_total - request.num_tokens, state.kv.most_drafts)
            if not asked or room <= 0:
                continue
            track.follow(request)
            for drafter in asked:
                limit = min(room, self._drafters[drafter])
                tokens = drafter.propose(request, request.num_pending - 1, limit)
                assert len(tokens) <= limit
                if tokens:
                    of_kind = ready if drafter.proposes else offers
                    of_kind.append(Offer(index, tokens, drafter.name, track, track.cost))
                if drafter.proposes and asks:
                    ahead.append((index, track))
                if tokens:
                    break
        if offers or ready:
            counts = self._lengths.choose(step, offers) if offers else []
            for offer, count in zip([*ready, *offers], [*(len(o.tokens) for o in ready), *counts], strict=True):
                count = min(count, step.budget, state.limits.max_num_drafts - step.num_drafts)
                count = self._room(state, step, step.requests[offer.index], count) if count > 0 else 0
                if count:
                    step.add_drafts(offer.index, offer.tokens[:count], is_prediction=offer.drafter == "prediction")
            step.offers = [*ready, *offers]
        if ahead:
            self._ask_ahead(state, step, ahead)

    def _ask_ahead(self, state: SchedulerState, step: StepDraft, ahead: list[tuple[int, Track]]) -> None:
        """Ask the worker's drafter for the tokens that the next step verifies."""
        assert self._proposer is not None
        if self._rests:
            self._rests = False
            return
        offers: list[Offer] = []
        for index, track in ahead:
            left = step.requests[index].max_tokens_total - step.requests[index].num_tokens - 1
            limit = min(self._drafters[self._proposer], left, state.kv.most_drafts)
            if limit > 0:
                offers.append(Offer(index, [0] * limit, self._proposer.name, track))
        counts = self._lengths.choose(step, offers) if offers else []
        self._rests = bool(step.drafts) and not any(counts)
        num_left = state.limits.max_num_drafts
        for offer, count in zip(offers, counts, strict=True):
            count = min(count, num_left)
            count = self._room(state, step, step.requests[offer.index], count) if count > 0 else 0
            if count > 0:
                num_left -= count
                offer.track.cost = offer.cost
                step.proposals[offer.index] = count

    def verified(self, state: SchedulerState, step: InFlight, result: StepResult, seconds: float) -> None:
        """Learn from a result, after it was applied."""
        self._lengths.measured(step, seconds)
        for offer in step.offers:
            request, tokens = step.requests[offer.index], result.token_ids[offer.index]
            drafts = step.drafts.get(offer.index, ())
            num_accepted = len(tokens) - 1
            if num_accepted < 0 or num_accepted > len(drafts):
                continue
            if drafts:
                state.draft_counts.add(len(drafts), num_accepted)
                self._lengths.judged(offer, len(drafts), num_accepted)
            elif request.status is not Status.FINISHED:
                offer.track.watch(offer.tokens, len(request.token_ids) - 1)
                offer.track.follow(request)
        if self._proposer is not None:
            for index, tokens in result.proposals.items():
                if step.requests[index] in self._requests:
                    self._proposer.take(step.requests[index], tokens)

    def _room(self, state: SchedulerState, step: StepDraft, request: Request, count: int) -> int:
        """Return how many of `count` tokens behind those that are planned there are blocks for."""
        end = request.num_computed_tokens + count
        if end > request.capacity and state.kv.allocate(
            request.kv, request.num_certain_tokens, end, request.row, step.deltas, drafts=True
        ):
            request.capacity = state.kv.capacity(request.kv)
        return min(count, request.capacity - request.num_computed_tokens)
