"""prediction: the text that a request expects as its output, followed as far as it comes true.

After a difference the drafter waits until the last tokens occur in the prediction again, and goes on from there; near
where it lost its place one token is enough.
"""

from __future__ import annotations

from quire.config.groups import SpeculativeConfig
from quire.sched.drafters.index import Match, TokenIndex
from quire.sched.drafts import Drafter
from quire.sched.request import Request

_SIZE = 2  # equal tokens after which it goes on
_LONGEST = 8
_CANDIDATES = 32
_NEAR = 3  # tokens around where it would be if a token had only been replaced


class _Follower:
    """Where the output stands in its prediction."""

    __slots__ = ("_index", "_is_sure", "_lost", "_next", "_seen", "_tokens")

    def __init__(self, tokens: list[int], num_prompt_tokens: int) -> None:
        self._tokens = tokens
        self._index = TokenIndex(tokens, _SIZE, len(tokens))
        self._seen = num_prompt_tokens  # tokens of the request that were compared
        self._next: int | None = 0  # index of the predicted token that comes next; None: it lost the place
        self._is_sure = True  # that place does not rest on a single token near where it was lost
        self._lost = 0  # behind a difference: what would come next if tokens had only been replaced

    def follow(self, known: list[int]) -> int | None:
        """Take in new tokens. Returns where the prediction goes on, None if that is not known."""
        if self._index.num_indexed < len(self._tokens):
            self._index.catch_up()
        for token in known[self._seen :]:
            self._seen += 1
            self._take(token)
        if self._next is None:
            self._next = self._find(known)
            self._is_sure = True
        return self._next

    def _take(self, token: int) -> None:
        tokens, place = self._tokens, self._next
        if place is None:
            self._next, self._is_sure = self._near(token), False
            self._lost += 1
        elif place < len(tokens) and tokens[place] == token:
            self._next, self._is_sure = place + 1, True
        else:
            self._lost = place + 1
            is_left_out = self._is_sure and tokens[place + 1 : place + 2] == [token]
            self._next, self._is_sure = place + 2 if is_left_out else None, False

    def _near(self, token: int) -> int | None:
        """The place behind this token, if it stands in the prediction near where that was lost."""
        first, last = max(0, self._lost - _NEAR), min(len(self._tokens), self._lost + _NEAR + 1)
        found = [place for place in range(first, last) if self._tokens[place] == token]
        return min(found, key=lambda place: abs(place - self._lost)) + 1 if found else None

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
