"""The one stream of events that metrics, log lines and traces are made of, and who may listen to it.

Events are plain facts about requests, steps and HTTP calls, told once, on the event loop. Knows no metric's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.types.messages import EngineInfo
from quire.types.outputs import EngineStats
from quire.types.request import FinishReason
from quire.types.sampling import SamplingParams


@dataclass(slots=True)
class TokenEvent:
    """What one batch of engine outputs brought to requests."""

    num_generation_tokens: int = 0
    num_prompt_tokens: int = 0  # of requests that got their first token or their vector
    num_cached_tokens: int = 0  # those of them that the prefix cache had
    first_token_latencies: list[float] = field(default_factory=list)  # seconds since arrival, one per request
    # Seconds per token since the completion's previous tokens -> outputs with it. Completions that run in step
    # have the same, so a step costs a few observations and not one per completion.
    token_latencies: dict[float, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CompletionEnd:
    finish_reason: FinishReason
    num_tokens: int
    first_token_time: float | None = None
    last_token_time: float | None = None


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """All about one request that has ended, in whatever way. Times are on the monotonic clock."""

    request_id: str
    params: SamplingParams
    num_prompt_tokens: int
    completions: tuple[CompletionEnd, ...]
    arrival_time: float
    finished_time: float
    first_token_time: float | None = None
    queue_time: float | None = None  # seconds; None when the engine never began it
    num_cached_tokens: int | None = None
    error: str | None = None
    trace_headers: Mapping[str, str] | None = None
    pools: bool = False  # its result is no text, and `params` say nothing

    @property
    def num_generation_tokens(self) -> int:
        return sum(completion.num_tokens for completion in self.completions)


@dataclass(frozen=True, slots=True)
class HttpEnd:
    """One answered HTTP call. `route` is the pattern that matched and never a path as it was sent."""

    method: str
    route: str
    status: int
    seconds: float


class Observer:
    """Listens to the events. This one hears nothing, so it is also what stands for "nobody listens"."""

    def on_stats(self, stats: EngineStats) -> None:
        """The engine finished a step, or something else changed its queues."""

    def on_tokens(self, event: TokenEvent) -> None:
        """A batch of outputs was taken in."""

    def on_request_end(self, event: RequestEnd) -> None:
        """A request finished, was stopped, was aborted or failed."""

    def on_http_end(self, event: HttpEnd) -> None:
        """An HTTP call was answered to its last byte, or its client left."""

    def on_engine_down(self) -> None:
        """The engine died or was shut down: it runs nothing any more, and its counts begin again."""

    def on_engine_start(self, info: EngineInfo) -> None:
        """An engine is ready: the first one, or one that takes the place of an engine that died."""

    def on_resume(self, num_requests: int) -> None:
        """Completions that an engine had when it was lost go on in the next one."""

    def on_journal_failure(self) -> None:
        """A response could not be written to the journal; it is served without it."""

    def close(self) -> None:
        """Nothing will happen any more. May block to send what has not been sent."""


NULL_OBSERVER = Observer()


class Observers(Observer):
    """Tells several listeners, in order."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def on_stats(self, stats: EngineStats) -> None:
        for observer in self._observers:
            observer.on_stats(stats)

    def on_tokens(self, event: TokenEvent) -> None:
        for observer in self._observers:
            observer.on_tokens(event)

    def on_request_end(self, event: RequestEnd) -> None:
        for observer in self._observers:
            observer.on_request_end(event)

    def on_http_end(self, event: HttpEnd) -> None:
        for observer in self._observers:
            observer.on_http_end(event)

    def on_engine_down(self) -> None:
        for observer in self._observers:
            observer.on_engine_down()

    def on_engine_start(self, info: EngineInfo) -> None:
        for observer in self._observers:
            observer.on_engine_start(info)

    def on_resume(self, num_requests: int) -> None:
        for observer in self._observers:
            observer.on_resume(num_requests)

    def on_journal_failure(self) -> None:
        for observer in self._observers:
            observer.on_journal_failure()

    def close(self) -> None:
        for observer in self._observers:
            observer.close()


class EngineCounters:
    """Sums of the engine's own counts over its restarts, each of which begins again at zero."""

    __slots__ = (
        "_before",
        "accepted_per_position",
        "num_accepted_tokens",
        "num_draft_tokens",
        "num_drafts",
        "num_preemptions",
        "prefix_hits",
        "prefix_queries",
        "prefix_without_state",
        "prompt_tokens",
    )

    def __init__(self) -> None:
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.prefix_without_state = 0
        self.prompt_tokens = 0
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.accepted_per_position: list[int] = []
        self._before = EngineStats()

    def add(self, stats: EngineStats) -> None:
        before = self._before
        self.num_preemptions += stats.num_preemptions - before.num_preemptions
        self.prefix_queries += stats.prefix_queries - before.prefix_queries
        self.prefix_hits += stats.prefix_hits - before.prefix_hits
        self.prefix_without_state += stats.prefix_without_state - before.prefix_without_state
        self.prompt_tokens += stats.prompt_tokens - before.prompt_tokens
        if stats.num_drafts != before.num_drafts:
            self._add_drafts(stats, before)
        self._before = stats

    def restart(self) -> None:
        self._before = EngineStats()

    def _add_drafts(self, stats: EngineStats, before: EngineStats) -> None:
        self.num_drafts += stats.num_drafts - before.num_drafts
        self.num_draft_tokens += stats.num_draft_tokens - before.num_draft_tokens
        self.num_accepted_tokens += stats.num_accepted_tokens - before.num_accepted_tokens
        counts = self.accepted_per_position
        counts += [0] * (len(stats.accepted_per_position) - len(counts))
        for position, count in enumerate(stats.accepted_per_position):
            counts[position] += count
        for position, count in enumerate(before.accepted_per_position):
            counts[position] -= count
