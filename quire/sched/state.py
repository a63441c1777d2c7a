"""What the parts of the scheduler share: the requests, the rows, the steps in flight, and the step in the making."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.kv.deltas import BlockDeltas
from quire.kv.manager import KVCacheManager
from quire.sched.adapters import NoAdapterSlots
from quire.sched.queues import WaitingQueue
from quire.sched.request import OrderKey, Request, Status
from quire.sched.step_times import StepWork, pairs_of
from quire.types.step import AdapterLoad, RowStart, StartedStep, StepPlan

if TYPE_CHECKING:
    from quire.sched.draft_lengths import Offer
    from quire.sched.drafts import NoDrafts
    from quire.sched.shares import TokenShares


@dataclass(frozen=True, slots=True)
class Limits:
    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    max_model_len: int
    max_num_drafts: int = 1 << 30  # of all requests in a step
    num_stages: int = 1  # of a pipeline, each of which computes another step
    query_tile: int = 1  # queries that a kernel of attention computes together


@dataclass(slots=True)
class Chunk:
    """A row of a planned step that does not reach the end of its request's tokens, so samples nothing."""

    end: int  # computed tokens after it
    num_preemptions: int  # the request's, when planned: tells whether the result still counts


@dataclass(slots=True, eq=False)
class StepDraft:
    """A step while it is being planned."""

    budget: int
    now: float
    query_tile: int = 1
    requests: list[Request] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)  # parallel to requests
    chunks: dict[int, Chunk] = field(default_factory=dict)  # index into requests -> chunk
    drafts: dict[int, list[int]] = field(default_factory=dict)  # index into requests -> tokens to verify
    offers: Sequence[Offer] = ()  # guesses, of which some are drafts
    predicted: set[int] = field(default_factory=set)  # indices whose drafts are of the request's own prediction
    proposals: dict[int, int] = field(default_factory=dict)
    """Index into requests -> tokens that the worker's drafter is to propose."""
    starts: list[RowStart] = field(default_factory=list)
    adapter_loads: list[AdapterLoad] = field(default_factory=list)
    deltas: BlockDeltas = field(default_factory=BlockDeltas)
    out_of_blocks: bool = False  # some request was preempted, or waits, for lack of them
    retry: bool = False
    shares: dict[Request, int] = field(default_factory=dict)
    """Tokens that prompts are to get, where they were decided beforehand."""
    num_drafts: int = 0  # of all requests
    num_prompts: int = 0  # requests that more is computed of than the token sampled last
    prompt_tokens: int = 0  # theirs
    pairs: float = 0.0  # of these tokens and those before them

    @property
    def work(self) -> StepWork:
        return StepWork(len(self.requests) - self.num_prompts, self.prompt_tokens, self.pairs)

    def add(self, request: Request, num_tokens: int) -> None:
        """Plan `num_tokens` of a request that has the blocks for them."""
        self.num_prompts += 1
        self.prompt_tokens += num_tokens
        self.pairs += pairs_of(request.num_computed_tokens, num_tokens, self.query_tile)
        end = request.num_computed_tokens + num_tokens
        request.num_computed_tokens = end
        if end == request.num_tokens:
            request.num_tokens += 1
        else:
            self.chunks[len(self.requests)] = Chunk(end, request.num_preemptions)
        self.requests.append(request)
        self.num_tokens.append(num_tokens)
        self.budget -= num_tokens

    def add_drafts(self, index: int, token_ids: list[int], *, is_prediction: bool = False) -> None:
        """Let a request of the step that samples verify drafts, which it has the blocks for."""
        request, count = self.requests[index], len(token_ids)
        self.num_drafts += count
        self.prompt_tokens += count
        self.pairs += pairs_of(request.num_computed_tokens, count)
        request.num_computed_tokens += count
        request.num_tokens += count
        self.num_tokens[index] += count
        self.drafts[index] = token_ids
        if is_prediction:
            self.predicted.add(index)
        self.budget -= count


@dataclass(slots=True)
class InFlight:
    """A plan that was handed out and whose result has not come back. How it runs, the engine's core notes."""

    plan: StepPlan
    requests: list[Request]  # parallel to plan.rows
    chunks: dict[int, Chunk]
    drafts: dict[int, list[int]]  # by index too
    retry: bool  # a step that runs one request alone after a failure
    work: StepWork
    offers: Sequence[Offer] = ()
    predicted: Collection[int] = ()
    handle: StartedStep | None = None  # None: it was not started yet
    started: float = 0.0  # on the core's clock
    needs_masks: bool = False  # before it can sample; true of the newest step only


@dataclass(slots=True)
class DraftCounts:
    """Since start: steps of requests with drafts, drafts that were verified, and those that held."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def add(self, num_tokens: int, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_tokens
        self.num_accepted_tokens += num_accepted
        counts = self.accepted_per_position
        counts += [0] * (num_tokens - len(counts))
        for position in range(num_accepted):
            counts[position] += 1


class Rows:
    """The permanent rows: which are free, and which the worker has not yet been told are free."""

    def __init__(self, count: int) -> None:
        self.free = list(range(count - 1, -1, -1))
        self.untold: list[int] = []

    def take(self) -> int:
        return self.free.pop()

    def give_back(self, row: int) -> None:
        self.free.append(row)
        self.untold.append(row)

    def tell(self) -> list[int]:
        """The rows freed since the last call."""
        told, self.untold = self.untold, []
        return told


class SchedulerState:
    def __init__(
        self,
        limits: Limits,
        kv: KVCacheManager,
        waiting: WaitingQueue,
        shares: TokenShares,
        drafting: NoDrafts,
        adapters: NoAdapterSlots,
    ) -> None:
        self.limits = limits
        self.adapters = adapters
        self.kv = kv
        self.shares = shares
        self.drafting = drafting
        self.requests: dict[str, Request] = {}  # all that are not finished
        # In order of service, so the one to preempt is always the last and is planned after all others.
        self.running: list[Request] = []
        # Running requests that want more than one token, in the order in which they began.
        self.prefilling: dict[Request, None] = {}
        self.waiting = waiting
        self.blocked: OrderKey | None = None  # a waiting request that blocks were short for: nobody passes it
        self.retries: list[Request] = []  # to be run alone, one per step, because a step they were in failed
        self.num_constrained = 0  # of the requests: those with a grammar
        self.rows = Rows(limits.max_num_seqs)
        self.max_running = limits.max_num_seqs  # may be lowered while the engine runs
        self.in_flight: deque[InFlight] = deque()
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.prefix_without_state = 0
        self.step_tokens = 0
        self.prompt_tokens = 0  # computed since start
        self.draft_counts = DraftCounts()

    @property
    def has_row(self) -> bool:
        """Whether another request may run."""
        return bool(self.rows.free) and len(self.running) < self.max_running

    def add_running(self, request: Request) -> None:
        running = self.running
        if not running or running[-1].key < request.key:
            running.append(request)
        else:
            insort(running, request, key=order_key)

    def note_progress(self, request: Request) -> None:
        """A running request wants more than one token now, or does not any more."""
        if request.num_tokens - request.num_computed_tokens > 1:
            self.prefilling[request] = None
        else:
            self.prefilling.pop(request, None)

    def end(self, request: Request) -> None:
        """Drop a request. The caller then calls forget_finished() once for all it has dropped."""
        if request.status is Status.RUNNING:
            self.kv.free(request.kv)
            self.rows.give_back(request.row)
            self.adapters.give_back(request)
        self.prefilling.pop(request, None)
        request.status = Status.FINISHED
        request.steady = False
        self.num_constrained -= request.constrained
        self.drafting.close(request)
        del self.requests[request.request_id]

    def forget_finished(self, finished: set[Request]) -> None:
        """Take ended requests out of every list."""
        self.running = [request for request in self.running if request.status is Status.RUNNING]
        if any(request.row < 0 for request in finished):
            self.waiting.remove(finished)
        if self.retries:
            self.retries = [request for request in self.retries if request not in finished]


def order_key(request: Request) -> OrderKey:
    return request.key
