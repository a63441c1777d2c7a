"""Drafters for tests of speculation: they know what a request will say, and tell it or something else."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from quire.engine.core import EngineCore
from quire.sched.drafts import Drafts
from quire.sched.request import Request


class Oracle:
    """Proposes `longest` tokens of the outputs that it knows, each wrong with some probability."""

    name = "oracle"

    def __init__(
        self,
        outputs: Mapping[str, Sequence[int]],
        vocab_size: int,
        longest: int = 4,
        wrong: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.default_tokens, self._wrong = longest, wrong
        self._outputs, self._vocab_size = outputs, vocab_size
        self._draw = random.Random(seed)

    def open(self, request: Request) -> bool:
        return True

    def close(self, request: Request) -> None:
        return None

    def propose(self, request: Request, num_in_flight: int, limit: int) -> list[int]:
        known = self._outputs[request.request_id]
        first = len(request.token_ids) - request.num_prompt_tokens + num_in_flight
        count = min(limit, self.default_tokens)
        if 0.0 < self._wrong < 1.0:
            count = self._draw.randint(0, count)
        return [
            (token + self._draw.randrange(1, self._vocab_size)) % self._vocab_size
            if self._draw.random() < self._wrong
            else token
            for token in known[first : first + count]
        ]


def draft_with(core: EngineCore, drafter: Oracle) -> None:
    core.scheduler._state.drafting = Drafts(drafter)
