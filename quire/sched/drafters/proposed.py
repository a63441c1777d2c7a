"""proposed: what the worker's drafter, a model, gave with the result before. The methods of --speculative-config that
have weights all draft like this."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.groups import SpeculativeConfig
from quire.sched.drafts import Drafter
from quire.sched.request import Request


@dataclass(slots=True)
class _Proposal:
    tokens: list[int]
    place: int  # where they begin in the request's tokens


class ProposedDrafter(Drafter):
    name = "proposed"
    proposes = True

    def __init__(self, config: SpeculativeConfig) -> None:
        self._proposals: dict[Request, _Proposal] = {}

    def close(self, request: Request) -> None:
        self._proposals.pop(request, None)

    def take(self, request: Request, tokens: list[int]) -> None:
        """Keep what was proposed behind the known tokens of a request."""
        self._proposals[request] = _Proposal(tokens, len(request.token_ids))

    def propose(self, request: Request, num_in_flight: int, limit: int) -> list[int]:
        proposal = self._proposals.get(request)
        if proposal is None:
            return []
        came = request.token_ids[proposal.place :]
        if proposal.tokens[: len(came)] != came[: len(proposal.tokens)]:
            return []
        first = len(came) + num_in_flight
        return proposal.tokens[first : first + limit]
