"""prediction: the text that a request expects as its output, followed as far as it comes true.

After a difference the drafter waits until the last tokens occur in the prediction again, and goes on from there; near
where it lost its place one token is enough. The more tokens have come as predicted, the longer its guesses.
"""

from __future__ import annotations

from quire.config.groups import SpeculativeConfig
from quire.sched.drafters.index import TokenIndex
from quire.sched.drafts import Drafter
from quire.sched.request import Request

_SIZE = 2  # equal tokens after which it goes on
_LONGEST = 8
_CANDIDATES = 32
_TRUSTED = 4  # tokens of a guess for each one that came as predicted
_NEAR = 3  # tokens around where it would be if a token had only been replaced


class _Follower:
    """Where the output stands in its prediction."""

    __slots__ = ("_index", "_lost", "_next", "_seen", "_tokens", "run")

    def __init__(self, tokens: list[int], num_prompt_tokens: int) -> None:
        self._tokens = tokens
        self._index = TokenIndex(tokens, _SIZE, len(tokens))
        self._seen = num_prompt_tokens  # tokens of the request that were compared
        self._next: int | None = 0  # index of the predicted token that comes next; None: it lost the place
        self._lost = 0  # what would come next then if tokens had only been replaced
        self.run = len(tokens)  # tokens in a row that came as predicted

    def follow(self, known: list[int]) -> int | None:
        """Take in new tokens. Returns where the prediction goes on, None if that is not known."""
        tokens = self._tokens
        self._index.catch_up()
        for token in known[self._seen :]:
            self._seen += 1
            place = self._next
            self._lost = (self._lost if place is None else place) + 1
            if place is None:
                self._next, self.run = self._near(token), 1
            elif tokens[place : place + 1] != [token]:  # one may be left out
                self._next, self.run = place + 2 if tokens[place + 1 : place + 2] == [token] else None, 1
            else:
                self._next, self.run = place + 1, self.run + 1
        if self._next is None and (matches := self._index.find(known, _LONGEST, _CANDIDATES)):
            found = max(matches, key=lambda match: (match.length, -match.end))
            self._next, self.run = found.end, found.length
        return self._next

    def _near(self, token: int) -> int | None:
        """The place behind this token, if it stands in the prediction near where that was lost."""
        places = range(max(0, self._lost - 1 - _NEAR), self._lost + _NEAR)
        found = [place + 1 for place in places if self._tokens[place : place + 1] == [token]]
        return min(found, key=lambda place: abs(place - self._lost), default=None)


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
        first = place + num_in_flight
        return request.engine_request.prediction[first : first + min(limit, _TRUSTED * follower.run)]
