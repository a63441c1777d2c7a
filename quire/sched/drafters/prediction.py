"""prediction: the text that a request expects as its output, followed as far as it comes true.

After a difference the drafter waits until the last tokens occur in the prediction again, and goes on from there.
"""

from __future__ import annotations

from quire.config.groups import SpeculativeConfig
from quire.sched.drafters.index import Match, TokenIndex
from quire.sched.drafts import Drafter
from quire.sched.request import Request

_SIZE = 2  # equal tokens after which it goes on
_LONGEST = 8
_CANDIDATES = 32


class _Follower:
    """Where the output stands in its prediction."""

    __slots__ = ("_index", "_next", "_seen", "_tokens")

    def __init__(self, tokens: list[int], num_prompt_tokens: int) -> None:
        self._tokens = tokens
        self._index = TokenIndex(tokens, _SIZE, len(tokens))
        self._seen = num_prompt_tokens  # tokens of the request that were compared
        self._next: int | None = 0  # index of the predicted token that comes next; None: it lost the place
        # After a difference, the place is looked for near where it was lost.

    def follow(self, known: list[int]) -> int | None:
        """Take in new tokens. Returns where the prediction goes on, None if that is not known."""
        tokens = self._tokens
        if self._index.num_indexed < len(tokens):
            self._index.catch_up()
        for token in known[self._seen :]:
            self._seen += 1
            place = self._next
            if place is not None and place < len(tokens) and tokens[place] == token:
                self._next = place + 1
            else:
                self._next = None
        if self._next is None:
            self._next = self._find(known)
        return self._next

    def _find(self, known: list[int]) -> int | None:
        matches = self._index.find(known, _LONGEST, _CANDIDATES)
        return max(matches, key=_rank).end if matches else None


def _rank(match: Match) -> tuple[int, int]:
    return match.length, -match.end


class PredictionDrafter(Drafter):
    name = "prediction"
    default_tokens = 16

    def __init__(self, config: SpeculativeConfig | None = None) -> None:
        self._followers: dict[Request, _Follower] = {}

    def open(self, request: Request) -> bool:
        predicted = request.engine_request.prediction
        if not predicted:
            return False
        self._followers[request] = _Follower(predicted, request.num_prompt_tokens)
        return True

    def close(self, request: Request) -> None:
        self._followers.pop(request, None)

    def propose(self, request: Request, num_in_flight: int, limit: int) -> list[int]:
        follower = self._followers[request]
        place = follower.follow(request.token_ids)
        if place is None:
            return []
        tokens = request.engine_request.prediction
        return tokens[place + num_in_flight : place + num_in_flight + limit]
