"""How many drafts a step verifies: as many as make tokens come faster, by measured acceptance and measured cost.

Acceptance costs nothing to measure: a guess that was not verified is compared with the tokens that come anyway. What
drafts cost is learnt from the steps that verified some. Knows counts and seconds; guesses no token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from operator import mul
from typing import Protocol

from quire.sched.request import Request
from quire.sched.state import InFlight, StepDraft
from quire.sched.step_times import StepTimes, StepWork, pairs_of

_MEMORY = 0.8  # part of what is known about acceptance that the next guess leaves
_DOUBT = 1.0  # guesses' worth of weight that the other requests' acceptance has for a new one
_GAIN = 1.03  # what drafts must be predicted to win: the prediction is not exact
_CREDIT = 4.0  # tokens that a request's drafts may have cost more than they gave
_EARNED = 0.005  # tokens of this credit that come with each token
_PROBED = 64  # of so many steps whose drafts would hold but look too expensive, one verifies some
_LIKELY = 0.7  # acceptance from which that is worth it
_RARELY = 0.05  # acceptance below which guesses are made in some steps only
_ASKED = 8  # one in so many


class Track:
    """What is known of the guesses for one request."""

    __slots__ = ("_guess", "_place", "credit", "hits", "num_steps", "seen", "trials")

    def __init__(self) -> None:
        self.hits = 0.0  # tokens of guesses that came, the old ones with less weight
        self.trials = 0.0  # tokens that were compared
        self.credit = _CREDIT
        self.seen = 0  # tokens of the request when credit was last earned
        self.num_steps = 0
        self._guess: Sequence[int] = ()  # not verified: compared with what comes
        self._place = 0  # where it begins in the request's tokens

    def acceptance(self, prior: float) -> float:
        """The probability that a token of a guess is right, if those before it are."""
        return (self.hits + _DOUBT * prior) / (self.trials + _DOUBT)

    def judge(self, num_tokens: int, num_right: int) -> None:
        """Of a guess of `num_tokens`, the first `num_right` were right."""
        self.hits = _MEMORY * self.hits + num_right
        self.trials = _MEMORY * self.trials + min(num_tokens, num_right + 1)

    def watch(self, guess: Sequence[int], place: int) -> None:
        """Compare a guess that is not verified with what comes, unless another one is being compared."""
        if not self._guess:
            self._guess, self._place = guess, place

    def follow(self, request: Request) -> None:
        """Take in the request's new tokens."""
        known = request.token_ids
        if self.seen:
            self.credit = min(_CREDIT, self.credit + _EARNED * (len(known) - self.seen))
        self.seen = len(known)
        guess, place = self._guess, self._place
        if not guess:
            return
        came = known[place : place + len(guess)]
        right = next(
            (n for n, (said, token) in enumerate(zip(guess, came, strict=False)) if said != token), len(came)
        )
        if right < len(came) or len(came) == len(guess):
            self.judge(len(guess), right)
            self._guess = ()


@dataclass(slots=True)
class Offer:
    """What a drafter guesses for a row of a step."""

    index: int  # of the request in the step
    tokens: list[int]
    drafter: str
    track: Track
    cost: float = field(default=0.0, init=False)  # tokens that the step could have given in the time of one draft


class DraftLengths(Protocol):
    """Decides how many drafts are verified."""

    def may_ask(self, track: Track, step: StepDraft) -> bool:
        """Whether a guess for this request is worth making."""

    def choose(self, step: StepDraft, offers: list[Offer]) -> list[int]:
        """How many tokens of each offer the step is to verify."""

    def judged(self, offer: Offer, num_drafts: int, num_accepted: int) -> None:
        """Of an offer's drafts that a step verified, so many held."""

    def measured(self, step: InFlight, seconds: float) -> None:
        """A step kept the device for `seconds`; 0 if that is not known."""


class EveryDraft:
    """All of them."""

    def may_ask(self, track: Track, step: StepDraft) -> bool:
        return True

    def choose(self, step: StepDraft, offers: list[Offer]) -> list[int]:
        return [len(offer.tokens) for offer in offers]

    def judged(self, offer: Offer, num_drafts: int, num_accepted: int) -> None:
        return None

    def measured(self, step: InFlight, seconds: float) -> None:
        return None


class MeasuredLengths:
    """The number with the most tokens a second, by an acceptance for each request and one model of steps' times.

    A request whose drafts cost more than they gave verifies none until it has earned the difference, which bounds
    what wrong drafts cost whatever the predictions say.
    """

    def __init__(self, times: StepTimes, prior: float = 0.6) -> None:
        """`times` is for this object alone: it learns from steps that only decode. `prior`: of acceptance."""
        self._times = times
        self._prior = prior
        self._num_expensive = 0  # steps in a row whose drafts were likely and looked too expensive

    def may_ask(self, track: Track, step: StepDraft) -> bool:
        track.num_steps += 1
        return track.acceptance(self._prior) >= _RARELY or track.num_steps % _ASKED == 0

    def choose(self, step: StepDraft, offers: list[Offer]) -> list[int]:
        rows = len(step.requests) - step.num_prompts
        counts = [0] * len(offers)
        gains: list[tuple[float, int]] = []  # probability that a draft holds, its offer
        for number, offer in enumerate(offers):
            if offer.track.credit > 0.0:
                chance = 1.0 if offer.drafter == "forced" else offer.track.acceptance(self._prior)
                gains += [(held, number) for held in accumulate(repeat(chance, len(offer.tokens)), mul)]
        if not gains:
            return counts
        rows = max(1, rows)
        context = sum(step.requests[offer.index].num_computed_tokens for offer in offers) // len(offers)
        gains.sort(reverse=True)
        alone = self._seconds(rows, 0, context)
        best, best_rate, tokens = 0, _GAIN * rows / alone, float(rows)
        for count, (held, _) in enumerate(gains, 1):
            tokens += held
            rate = tokens / self._seconds(rows, count, context)
            if rate > best_rate:
                best, best_rate = count, rate
        if not best and gains[0][0] >= _LIKELY:
            self._num_expensive += 1
            if self._num_expensive % _PROBED == 0:
                best = min(len(gains), 2)
        if not best:
            return counts
        cost = (self._seconds(rows, best, context) / alone - 1.0) * rows / best
        for _, number in gains[:best]:
            counts[number] += 1
            offers[number].cost = cost
        return counts

    def judged(self, offer: Offer, num_drafts: int, num_accepted: int) -> None:
        track = offer.track
        track.credit = min(_CREDIT, track.credit + num_accepted - num_drafts * offer.cost)
        if offer.drafter != "forced":
            track.judge(num_drafts, num_accepted)
            self._learn(num_accepted / num_drafts)

    def measured(self, step: InFlight, seconds: float) -> None:
        num_drafts = sum(map(len, step.drafts.values()))
        if seconds > 0.0 and step.work.prompt_tokens == num_drafts:
            self._times.measured(step.work, seconds)

    def _learn(self, share: float) -> None:
        self._prior += 0.02 * (min(0.9, max(0.1, share)) - self._prior)

    def _seconds(self, rows: int, num_drafts: int, context: int) -> float:
        return self._times.of(StepWork(rows, num_drafts, pairs_of(context, num_drafts)))
