"""How many drafts a step verifies: as many as make tokens come faster, by measured acceptance and measured cost.

Acceptance costs nothing to measure: a guess that was not verified is compared with the tokens that come anyway. What
drafts cost is learnt from the steps that verified some. Knows counts and seconds; guesses no token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from operator import mul

from quire.sched.draft_costs import DraftCosts
from quire.sched.request import Request
from quire.sched.state import InFlight, StepDraft
from quire.sched.step_times import StepTimes

_MEMORY = 0.8  # part of what is known about acceptance that the next guess leaves
_DOUBT = 1.0  # guesses' worth of weight that the other requests' acceptance has for a new one
_GAIN = 1.1  # what drafts must be predicted to win: the prediction is not exact, and rows win unevenly
_CREDIT = 4.0  # tokens that a request's drafts may have cost more than they gave
_EARNED = 0.03  # tokens of this credit that come with each token: of a batch, it bears what all drafts cost
_PROBED = 0.01  # part of the time in which drafts are verified that would hold but look too expensive
_LIKELY = 0.7  # acceptance from which that is worth it
_EXPLORED = 0.1  # share of the account that the first step with a larger number of drafts may lose, as predicted
# Below this speed-up, one step in this many verifies no drafts, to measure what that takes: the closer, the more.
_COMPARED = ((1.2, 6), (1.5, 12), (2.5, 32), (float("inf"), 64))
_LOSS = 4.0  # steps without drafts that all drafts together may have cost more than they gave
_MOST_OWED = -2.0  # below it a stall is more likely than drafts that cost so much: they are tried again sometime
_REGAINED = 0.006  # of these come back with each step
_RARELY = 0.05  # acceptance below which guesses are made in some steps only
_IN_VAIN = 8  # steps in a row that had guesses and verified none: after them too, for guessing takes the host time
_ASKED = 8  # one in this many


class Track:
    """What is known of the guesses for one request."""

    __slots__ = ("_guess", "_place", "cost", "credit", "hits", "num_steps", "seen", "trials")

    def __init__(self) -> None:
        self.hits = 0.0  # tokens of guesses that came, the old ones with less weight
        self.trials = 0.0  # tokens that were compared
        self.credit = _CREDIT
        self.cost = 0.0  # of each token that the worker was asked to propose, as Offer.cost
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
    cost: float = 0.0  # tokens that the step could have given in the time of one draft


class EveryDraft:
    """All drafts are verified."""

    def may_ask(self, track: Track, step: StepDraft) -> bool:
        """Whether a guess for this request is worth making."""
        return True

    def choose(self, step: StepDraft, offers: list[Offer]) -> list[int]:
        """How many tokens of each offer the step is to verify."""
        return [len(offer.tokens) for offer in offers]

    def judged(self, offer: Offer, num_drafts: int, num_accepted: int) -> None:
        """How many of an offer's drafts, which a step verified, were accepted."""

    def measured(self, step: InFlight, seconds: float) -> None:
        """A step kept the device for `seconds`; 0 if that is not known."""


class MeasuredLengths(EveryDraft):
    """The number with the most tokens a second, by an acceptance for each request and what drafts cost before.

    Two accounts bound what drafts cost whatever the predictions say: a request whose drafts cost more than they gave
    verifies none until it has earned the difference, and nobody does while all drafts together cost more time, as
    measured, than they gave.
    """

    def __init__(self, times: StepTimes, prior: float = 0.6) -> None:
        """`times` is for this object alone; `prior` is believed of acceptance."""
        self._costs = DraftCosts(times)
        self._prior = prior
        self._step: StepDraft | None = None  # the one that is planned
        self._num_steps = 0
        self._verifies = False  # whether that step does
        self._num_in_vain = 0
        self._last_probe = 0  # the step that last verified drafts although they looked too expensive
        self._last_plain = 0  # the step that last verified none
        self._compare_after = _COMPARED[0][1]  # steps after it, until one is to be measured again
        self._account = _LOSS  # steps without drafts that drafts gave, less those that they cost
        self._accepted_worth = 0.0  # of each accepted draft of the step that is judged, in such steps

    def may_ask(self, track: Track, step: StepDraft) -> bool:
        self._begin(step)
        if self._num_in_vain >= _IN_VAIN:
            return self._num_steps % _ASKED == 0
        track.num_steps += 1
        return track.acceptance(self._prior) >= _RARELY or track.num_steps % _ASKED == 0

    def choose(self, step: StepDraft, offers: list[Offer]) -> list[int]:
        self._begin(step)
        counts = [0] * len(offers)
        gains: list[tuple[float, int]] = []  # probability that a draft holds, its offer
        rows = max(1, len(step.requests) - step.num_prompts)
        most = self._costs.most(rows)
        for number, offer in enumerate(offers):
            if offer.track.credit > 0.0:
                chance = 1.0 if offer.drafter == "forced" else offer.track.acceptance(self._prior)
                gains += [(held, number) for held in accumulate(repeat(chance, min(most, len(offer.tokens))), mul)]
        gains.sort(reverse=True)
        best = self._best(rows, [held for held, _ in gains[:most]])
        self._num_in_vain = 0 if best else self._num_in_vain + 1
        if not best:
            return counts
        self._verifies = True
        extra = self._costs.extra(rows, best)
        for _, number in gains[:best]:
            counts[number] += 1
            offers[number].cost = extra / best * rows
        for offer, count in zip(offers, counts, strict=True):
            if not count:  # the row waits for the others' drafts
                offer.track.credit = min(_CREDIT, offer.track.credit + extra)
        return counts

    def judged(self, offer: Offer, num_drafts: int, num_accepted: int) -> None:
        track = offer.track
        track.credit = min(_CREDIT, track.credit + num_accepted - num_drafts * offer.cost)
        self._account = min(_LOSS, self._account + num_accepted * self._accepted_worth)
        if offer.drafter != "forced":
            track.judge(num_drafts, num_accepted)
            self._prior += 0.02 * (min(0.9, max(0.1, num_accepted / num_drafts)) - self._prior)

    def measured(self, step: InFlight, seconds: float) -> None:
        num_drafts, rows = sum(map(len, step.drafts.values())), len(step.requests)
        # A step that only proposes is neither of what is compared; of the others, drafting is a part of the cost.
        is_plain = num_drafts > 0 or not step.plan.num_proposals
        is_known = seconds > 0.0 and step.work.prompt_tokens == num_drafts and is_plain
        self._accepted_worth = 1.0 / rows if is_known else 0.0
        self._account = min(_LOSS, self._account + _REGAINED)
        if is_known:
            self._account = max(_MOST_OWED, self._account - self._costs.measured(rows, num_drafts, seconds))

    def _begin(self, step: StepDraft) -> None:
        if step is not self._step:
            if not self._verifies:
                self._last_plain = self._num_steps
            self._step, self._num_steps, self._verifies = step, self._num_steps + 1, False

    def _best(self, rows: int, gains: list[float]) -> int:
        """How many of these drafts give the most tokens a second, the most probable first."""
        if not gains or self._account <= 0.0 or self._num_steps - self._last_plain >= self._compare_after:
            return 0
        best, best_rate, tokens = 0, 0.0, float(rows)
        for count, held in enumerate(gains, 1):
            tokens += held
            rate = tokens / rows / (1.0 + self._costs.extra(rows, count))
            if rate > best_rate:
                best, best_rate = count, rate
        self._compare_after = next(steps for rate, steps in _COMPARED if max(best_rate, _GAIN) < rate)
        if best_rate > _GAIN:
            return best
        lost = self._costs.extra(rows, len(gains)) - sum(gains) / rows
        if len(gains) > self._costs.tried(rows) and lost <= _EXPLORED * self._account:
            return len(gains)
        few = min(len(gains), max(best, self._costs.first(rows)))
        if gains[0] >= _LIKELY and self._costs.extra(rows, few) <= _PROBED * (self._num_steps - self._last_probe):
            self._last_probe = self._num_steps
            return few
        return 0
