"""ngram: what followed the last tokens where they occurred before in the same request (prompt lookup)."""

from __future__ import annotations

from collections.abc import Sequence

from quire.config.groups import SpeculativeConfig
from quire.config.speculative import lookup_sizes
from quire.sched.drafters.index import TokenIndex
from quire.sched.drafts import Drafter
from quire.sched.request import Request

_CANDIDATES = 8  # occurrences that are compared


class NgramDrafter(Drafter):
    name = "ngram"

    def __init__(self, config: SpeculativeConfig) -> None:
        self._shortest, self._longest = lookup_sizes(config)
        self._indices: dict[Request, TokenIndex] = {}

    def open(self, request: Request) -> bool:
        self._indices[request] = TokenIndex(request.token_ids, self._shortest, request.max_tokens_total)
        return True

    def close(self, request: Request) -> None:
        self._indices.pop(request, None)

    def propose(self, request: Request, num_in_flight: int, limit: int) -> list[int]:
        index = self._indices[request]
        index.catch_up()
        known = request.token_ids
        matches = index.find(known, self._longest, _CANDIDATES)
        if not matches:
            return []
        best = max(matches, key=lambda match: match.length)
        return continuation(known, best.end, num_in_flight, limit)


def continuation(tokens: Sequence[int], start: int, skipped: int, count: int) -> list[int]:
    """What follows `tokens`, if it is what followed their part before `start`; past their end it repeats itself."""
    period = len(tokens) - start
    if skipped + count <= period:
        return list(tokens[start + skipped : start + skipped + count])
    return [tokens[start + offset % period] for offset in range(skipped, skipped + count)]
