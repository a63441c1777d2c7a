"""The number of drafts: never much slower than none, whatever drafts cost and hold, and much faster if they do."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable

import msgspec
import pytest

from quire.kv.layout import plan_layout
from quire.kv.manager import KVCacheManager
from quire.sched.draft_lengths import MeasuredLengths, Track
from quire.sched.drafters.prediction import PredictionDrafter
from quire.sched.drafts import Drafter, Drafts
from quire.sched.request import Request
from quire.sched.scheduler import Scheduler
from quire.sched.state import Limits
from quire.sched.step_times import Prior, StepTimes
from quire.types.step import StepPlan, StepResult
from tests.sched.driver import FULL, make_request

LENGTH = 512
Cost = Callable[[int, int], float]  # rows, drafts -> seconds
Right = Callable[[random.Random, int, int], float]  # position, how many drafts -> probability that the next is right


def token_at(name: str, position: int) -> int:
    return zlib.crc32(f"{name} {position}".encode()) % 1000  # the same in every process


class KnowingDrafter(Drafter):
    """Knows what will come, and says it with a probability that a test chooses."""

    name = "knowing"

    def __init__(self, right: Right, longest: int, seed: int) -> None:
        self._right, self._longest = right, longest
        self._draw = random.Random(seed)
        self.num_asked = 0

    def propose(self, request: Request, num_in_flight: int, limit: int) -> list[int]:
        self.num_asked += 1
        start = len(request.token_ids) + num_in_flight
        guess = []
        for offset in range(min(limit, self._longest)):
            truth = token_at(request.request_id, start + offset)
            is_right = self._draw.random() < self._right(self._draw, start + offset, offset)
            guess.append(truth if is_right else 1001)
        return guess


class Clock:
    """A device on which a step takes as long as its tokens say; what is measured is more by some noise."""

    def __init__(self, cost: Cost, noise: float, seed: int) -> None:
        self._cost, self._noise = cost, noise
        self._draw = random.Random(seed)
        self.seconds = 0.0
        self._rows: dict[int, tuple[str, int]] = {}  # row -> request, known tokens
        self.num_drafts = 0
        self.num_accepted = 0

    def run(self, plan: StepPlan) -> tuple[StepResult, float]:
        for start in plan.starts:
            self._rows[start.row] = start.request_id, len(start.token_ids)
        tokens = []
        for row in plan.rows:
            name, known = self._rows[row]
            drafts = plan.draft_token_ids.get(row, [])
            truth = [token_at(name, known + offset) for offset in range(1 + len(drafts))]
            held = next((n for n, token in enumerate(drafts) if token != truth[n]), len(drafts))
            self.num_drafts += len(drafts)
            self.num_accepted += held
            tokens.append(truth[: held + 1])
            self._rows[row] = name, known + held + 1
        seconds = self._cost(len(plan.rows), sum(map(len, plan.draft_token_ids.values())))
        self.seconds += seconds
        return StepResult(plan.step_id, tokens), seconds * self.slowdown()

    def slowdown(self) -> float:
        return 1.0 + self._noise * self._draw.random()


class BusyClock(Clock):
    """Other work makes the machine up to three times as slow, now more and now less, and some steps much slower."""

    load = 1.0

    def slowdown(self) -> float:
        draw = self._draw
        self.load = min(3.0, max(1.0, self.load * draw.uniform(0.93, 1.07)))
        return self.load * draw.uniform(1.0, 1.2) * (draw.uniform(2.0, 4.0) if draw.random() < 0.05 else 1.0)


class StalledClock(Clock):
    """Other work stops the machine for a while: some steps with drafts, one after the other, take a hundred times."""

    num_steps = 0
    num_stalled = 3

    def run(self, plan: StepPlan) -> tuple[StepResult, float]:
        self.num_steps += 1
        return super().run(plan)

    def slowdown(self) -> float:
        if self.num_steps < 30 or not self.num_drafts or not self.num_stalled:
            return super().slowdown()
        self.num_stalled -= 1
        return 100.0


class CapturingClock(Clock):
    """Steps are padded, and the first of each size is captured before it runs, which takes as long as many steps."""

    def __init__(self, cost: Cost, noise: float, seed: int) -> None:
        super().__init__(cost, noise, seed)
        self._known: set[int] = set()

    def run(self, plan: StepPlan) -> tuple[StepResult, float]:
        result, seconds = super().run(plan)
        size = 1 << (len(plan.rows) + sum(map(len, plan.draft_token_ids.values()))).bit_length()
        if not plan.draft_token_ids or size in self._known:
            return result, seconds
        self._known.add(size)
        return result, 0.0  # as the engine tells the scheduler of such a step


class Follows(PredictionDrafter):
    """Knows what will come but for some tokens, as a prediction does: after each of them it loses its place."""

    def __init__(self, share: float, seed: int) -> None:
        super().__init__()
        self._share, self._draw = share, random.Random(seed)

    def open(self, request: Request) -> bool:
        name, draw = request.request_id, self._draw
        truth = [token_at(name, place) for place in range(1, LENGTH + 1)]
        prediction = [token if draw.random() < self._share else 1001 + draw.randrange(50) for token in truth]
        request.engine_request = msgspec.structs.replace(request.engine_request, prediction=prediction)
        return super().open(request)


def linear(cost: Prior) -> Cost:
    return lambda rows, drafts: cost.fixed + cost.per_row * rows + cost.per_token * drafts


def serve(batch: int, cost: Cost, drafter: Drafter | None, noise: float = 0.1, clock: Clock | None = None) -> Clock:
    layout = plan_layout(FULL, 16)
    drafting = None if drafter is None else Drafts(drafter, lengths=MeasuredLengths(StepTimes()))
    scheduler = Scheduler(
        Limits(
            max_num_seqs=batch, max_num_batched_tokens=4096, long_prefill_token_threshold=4096, max_model_len=2048
        ),
        policy="fcfs",
        kv=KVCacheManager(layout, batch * 40, False),
        drafting=drafting,
    )
    for number in range(batch):
        scheduler.add_request(make_request(str(number), [1], LENGTH))
    clock = clock or Clock(cost, noise, 0)
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        assert plan is not None
        result, measured = clock.run(plan)
        scheduler.update(plan, result, measured)
    return clock


PATTERNS: dict[str, Right] = {
    "never": lambda draw, position, offset: 0.0,
    "seldom": lambda draw, position, offset: 0.15,
    "half": lambda draw, position, offset: 0.5,
    "mostly": lambda draw, position, offset: 0.8,
    "always": lambda draw, position, offset: 1.0,
    "first only": lambda draw, position, offset: float(offset == 0),
    "in runs": lambda draw, position, offset: float(position // 40 % 2),
    "until it is trusted": lambda draw, position, offset: float(position < 20),
    "every other": lambda draw, position, offset: float(position % 2),
}
COSTS: dict[str, Cost] = {
    "drafts are free": linear(Prior(0.01, 0.001, 0.00001, 0.0)),
    "like a laptop": linear(Prior(0.010, 0.002, 0.0035, 0.0)),
    "like a GPU": linear(Prior(0.006, 0.00005, 0.00003, 0.0)),
    "as much as a row": linear(Prior(0.001, 0.002, 0.002, 0.0)),
    "more than a step": linear(Prior(0.004, 0.001, 0.009, 0.0)),
    "in tiles": lambda rows, drafts: 0.01 + 0.004 * -(-(rows + drafts) // 4),
    "a cliff": lambda rows, drafts: 0.01 + 0.001 * rows + 0.012 * (rows + drafts > 4),
    "a wait": lambda rows, drafts: 0.0042 + 0.00003 * (rows + drafts) + 0.0013 * (drafts > 0),
}


@pytest.mark.parametrize("cost", list(COSTS)[:5])
@pytest.mark.parametrize(
    ("pattern", "batch"),
    [*((pattern, batch) for pattern in PATTERNS for batch in (1, 8)), ("half", 4), ("never", 64), ("half", 64)],
)
def test_drafts_never_cost_much(pattern: str, cost: str, batch: int) -> None:
    without = serve(batch, COSTS[cost], None)
    drafted = serve(batch, COSTS[cost], KnowingDrafter(PATTERNS[pattern], 4, 7))
    assert drafted.seconds <= (1.05 if batch < 8 else 1.03) * without.seconds, (
        f"{drafted.seconds / without.seconds:.3f}, {drafted.num_accepted} of {drafted.num_drafts}"
    )


@pytest.mark.parametrize("batch", [1, 8, 16, 64])
@pytest.mark.parametrize("pattern", list(PATTERNS))
def test_a_wait_for_any_draft_never_costs_much(pattern: str, batch: int) -> None:
    """A batch takes as long as its slowest row, which pays for the others' drafts: it must not run out of its own."""
    without = serve(batch, COSTS["a wait"], None)
    drafted = serve(batch, COSTS["a wait"], KnowingDrafter(PATTERNS[pattern], 4, 7), noise=0.05)
    assert drafted.seconds <= (1.05 if batch < 8 else 1.03) * without.seconds


@pytest.mark.parametrize("cost", ["like a laptop", "in tiles", "a cliff"])
@pytest.mark.parametrize("pattern", ["never", "half", "mostly", "in runs"])
def test_drafts_never_cost_much_on_a_busy_machine(pattern: str, cost: str) -> None:
    """What it takes without other work is compared: measurements mislead, and the bounds hold all the same."""
    for batch in (1, 4, 8):
        clock = BusyClock(COSTS[cost], 0.0, seed=batch)
        drafted = serve(batch, COSTS[cost], KnowingDrafter(PATTERNS[pattern], 4, batch), clock=clock)
        without = LENGTH * COSTS[cost](batch, 0)
        assert drafted.seconds <= (1.05 if batch < 8 else 1.03) * without, f"{batch}: {drafted.seconds / without:.3f}"


def test_drafts_that_hold_pay_on_a_busy_machine() -> None:
    for batch, at_least in ((1, 2.2), (4, 1.3)):
        clock = BusyClock(COSTS["in tiles"], 0.0, seed=0)
        drafted = serve(batch, COSTS["in tiles"], KnowingDrafter(PATTERNS["always"], 4, 0), clock=clock)
        assert LENGTH * COSTS["in tiles"](batch, 0) / drafted.seconds >= at_least


@pytest.mark.parametrize(("name", "part"), [("like a laptop", 0.8), ("as much as a row", 0.6), ("in tiles", 0.8)])
def test_a_stalled_machine_is_not_what_drafts_cost(name: str, part: float) -> None:
    for seed in range(3):
        found = []
        for kind in (Clock, StalledClock):
            drafter = KnowingDrafter(PATTERNS["always"], 8, 0)
            found.append(serve(1, COSTS[name], drafter, clock=kind(COSTS[name], 0.1, seed)).num_drafts)
        steady, stalled = found
        assert stalled > part * steady


@pytest.mark.parametrize(
    ("pattern", "cost", "batch", "at_least"),
    [
        ("always", "drafts are free", 1, 4.5),
        ("always", "like a laptop", 1, 2.0),
        ("always", "like a GPU", 1, 4.5),
        ("always", "like a GPU", 64, 2.4),
        ("mostly", "like a GPU", 8, 2.5),
        ("in runs", "like a GPU", 1, 1.3),
        # Two drafts in eight rows do not pay what a step waits for any, many do: they must be tried.
        ("always", "a wait", 8, 2.8),
        ("mostly", "a wait", 8, 1.8),
        ("half", "a wait", 8, 1.05),
        ("always", "a wait", 64, 1.6),
    ],
)
@pytest.mark.parametrize("captures", [False, True])
def test_drafts_that_hold_pay(pattern: str, cost: str, batch: int, at_least: float, captures: bool) -> None:
    without = serve(batch, COSTS[cost], None)
    clock = (CapturingClock if captures else Clock)(COSTS[cost], 0.1, 0)
    drafted = serve(batch, COSTS[cost], KnowingDrafter(PATTERNS[pattern], 4, 7), clock=clock)
    assert without.seconds / drafted.seconds >= at_least


@pytest.mark.parametrize(("batch", "at_least"), [(1, 3.5), (8, 3.5), (64, 2.0)])
def test_what_was_captured_for_drafts_is_not_what_they_cost(batch: int, at_least: float) -> None:
    without = serve(batch, COSTS["like a GPU"], None)
    clock = CapturingClock(COSTS["like a GPU"], 0.05, 0)
    drafted = serve(batch, COSTS["like a GPU"], KnowingDrafter(PATTERNS["always"], 4, 7), clock=clock)
    assert without.seconds / drafted.seconds >= at_least


@pytest.mark.parametrize(
    ("cost", "batch", "share", "at_least"),
    [
        ("a wait", 8, 0.5, 0.97),
        ("a wait", 8, 0.9, 1.6),
        ("a wait", 64, 0.9, 1.05),
        ("a wait", 64, 0.97, 1.25),
        ("in tiles", 8, 0.9, 1.12),
        ("in tiles", 8, 0.97, 1.35),
        ("like a GPU", 64, 0.97, 1.8),
    ],
)
def test_a_row_that_waited_for_others_drafts_may_draft_again(
    cost: str, batch: int, share: float, at_least: float
) -> None:
    """Drafts that are mostly right hold for most rows and not for some, which would end the batch late."""
    without = serve(batch, COSTS[cost], None)
    for seed in range(2):
        drafted = serve(batch, COSTS[cost], Follows(share, seed), noise=0.05)
        assert without.seconds / drafted.seconds >= at_least


class CertainDrafter(KnowingDrafter):
    is_certain = True


@pytest.mark.parametrize(("drafter", "most"), [(KnowingDrafter, 0.25), (CertainDrafter, 1.0)])
def test_guesses_that_nothing_comes_of_are_made_in_few_steps(drafter: type[KnowingDrafter], most: float) -> None:
    """At 64 rows drafts cost more than they give, and guessing for each of them takes the host time."""
    guesses = drafter(PATTERNS["half"], 4, 7)
    serve(64, COSTS["more than a step"], guesses)
    assert most / 2 < guesses.num_asked / (64 * LENGTH) <= most


@pytest.mark.parametrize("seed", range(8))
def test_any_cost_and_any_acceptance(seed: int) -> None:
    """Costs over three orders of magnitude, drafts that hold as if by chance, noisy measurements."""
    draw = random.Random(seed)
    fixed = 10 ** draw.uniform(-4, -1)
    cost = linear(Prior(fixed, fixed * 10 ** draw.uniform(-3, 0), fixed * 10 ** draw.uniform(-3, 0.5), 0.0))
    chances = [draw.random() for _ in range(20)]
    batch = draw.choice([1, 2, 4, 8])
    drafter = KnowingDrafter(lambda _, position, offset: chances[position // 30 % 20], draw.choice([1, 4, 16]), seed)
    without, drafted = serve(batch, cost, None), serve(batch, cost, drafter, noise=0.3)
    assert drafted.seconds <= (1.05 if batch < 8 else 1.03) * without.seconds


def test_guesses_that_are_not_verified_are_compared_with_what_comes() -> None:
    track = Track()
    (request,) = _requests([1, 2, 3])
    track.watch([5, 6, 7], 3)
    track.follow(request)
    assert track.trials == 0
    request.token_ids += [5]
    track.follow(request)
    assert track.trials == 0, "the rest has not come yet"
    request.token_ids += [9]
    track.follow(request)
    assert (track.hits, track.trials) == (1, 2)
    track.watch([4], 5)
    request.token_ids += [4, 4]
    track.follow(request)
    assert track.hits == pytest.approx(1.8)
    assert track.acceptance(0.5) > 0.5


def _requests(*prompts: list[int]) -> list[Request]:
    kv = KVCacheManager(plan_layout(FULL, 16), 10, False)
    made = [make_request(str(number), prompt, 100) for number, prompt in enumerate(prompts)]
    return [Request(request, kv.open(request), (0, 0), 200) for request in made]
