"""forced: what a grammar leaves no choice about (jump-forward). Comes before any other drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.sched.drafts import Drafter
from quire.sched.request import Request

Forced = tuple[int, Sequence[int]]
"""Tokens, and the number of the request's outputs before them."""


def nothing_forced(request_id: str) -> Forced:
    """There are no grammars."""
    return 0, ()


class ForcedDrafter(Drafter):
    name = "forced"
    default_tokens = 16

    def __init__(self, forced: Callable[[str], Forced]) -> None:
        self._forced = forced

    def open(self, request: Request) -> bool:
        return request.constrained

    def propose(self, request: Request, num_in_flight: int, limit: int) -> list[int]:
        start, tokens = self._forced(request.request_id)
        if not tokens:
            return []
        outputs = request.token_ids[request.num_prompt_tokens + start :]
        if list(tokens[: len(outputs)]) != outputs[: len(tokens)]:
            return []
        first = len(outputs) + num_in_flight
        return list(tokens[first : first + limit])
