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
    is_certain = True

    def __init__(self, forced: Callable[[str], Forced]) -> None:
        self._forced = forced

    def open(self, request: Request) -> bool:
        return request.constrained

    def propose(self, request: Request, num_in_flight: int, limit: int) -> list[int]:
        start, tokens = self._forced(request.request_id)
        if not tokens:
            return []
        place = request.num_prompt_tokens + start  # behind the known tokens, if drafts before it are in flight
        outputs = request.token_ids[place:]
        first = len(request.token_ids) + num_in_flight - place
        if first < 0 or list(tokens[: len(outputs)]) != outputs[: len(tokens)]:
            return []
        return list(tokens[first : first + limit])
