"""What is known of each request after a run: its times, its tokens, and how it failed if it did."""

from __future__ import annotations

from itertools import accumulate

import msgspec


class RequestRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request. Times are seconds since the run began."""

    index: int
    due: float  # when it should have been sent
    start: float  # when it was sent
    first_token: float | None = None
    last_token: float | None = None
    end: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    counted_chunks: bool = False  # the server sent no usage: output_tokens are chunks, prompt_tokens our own count
    gaps: list[float] = []  # between consecutive pieces of the answer
    error: str | None = None  # kind of failure
    message: str | None = None  # its details

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.start

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first one; None for answers of one token."""
        if self.first_token is None or self.last_token is None or self.output_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.output_tokens - 1)

    @property
    def e2e(self) -> float:
        return self.end - self.start

    @property
    def delay(self) -> float:
        """How long the request waited here, for a free slot or for this program, after it was due."""
        return self.start - self.due


def in_flight(records: list[RequestRecord]) -> list[tuple[float, int]]:
    """(time, requests in flight from then on), in order of time."""
    changes: dict[float, int] = {}
    for record in records:
        changes[record.start] = changes.get(record.start, 0) + 1
        changes[record.end] = changes.get(record.end, 0) - 1
    times = sorted(changes)
    return list(zip(times, accumulate(changes[time] for time in times), strict=True))
