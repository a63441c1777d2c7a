"""suffix: what followed the longest equal context, in this request and in past outputs of the same tenant.

The suffix tree is not stored: occurrences of a context are found by hash chains, and their continuations vote. So a
past token costs some bytes. Outputs of one tenant (API key) and cache salt are never drafts for another.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence

from quire.config.groups import SpeculativeConfig
from quire.sched.drafters.index import TokenIndex
from quire.sched.drafts import Drafter
from quire.sched.request import Request

_SIZE = 2  # the shortest context
_CANDIDATES = 16  # occurrences that vote
_MAX_TOKENS = 1 << 20  # past tokens of all tenants together
_FIRST_ROOM = 512  # tokens of a tenant's first generation
_BETWEEN = -1  # stands between two outputs

Tenant = tuple[str | None, str | None]
_Branch = tuple[Sequence[int], int]  # tokens, and where one of their continuations is


class _Generation:
    """Outputs of about the same age, which are forgotten together."""

    __slots__ = ("capacity", "index", "num_requests", "tokens")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.tokens = array("i")
        self.index = TokenIndex(self.tokens, _SIZE, capacity)
        self.num_requests = 0


class PastOutputs:
    """The outputs of one tenant, in two generations: a third one takes the place of the oldest.

    A generation has room for twice as many tokens as the one before it, up to half of the limit.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max(1, max_requests // 2)
        self._max_tokens = max(2, max_tokens // 2)
        self.generations = [_Generation(min(_FIRST_ROOM, self._max_tokens))]

    @property
    def capacity(self) -> int:
        """Tokens that memory is taken for."""
        return sum(generation.capacity for generation in self.generations)

    def add(self, outputs: Sequence[int]) -> None:
        outputs = outputs[: self._max_tokens - 1]
        newest = self.generations[-1]
        if newest.num_requests >= self._max_requests or len(newest.tokens) + len(outputs) >= newest.capacity:
            capacity = min(max(2 * newest.capacity, 2 * len(outputs)), self._max_tokens)
            newest = _Generation(capacity)
            self.generations = [self.generations[-1], newest]
        newest.tokens.extend(outputs)
        newest.tokens.append(_BETWEEN)
        newest.num_requests += 1


class SuffixDrafter(Drafter):
    name = "suffix"
    default_tokens = 16

    def __init__(self, config: SpeculativeConfig, max_tokens: int = _MAX_TOKENS) -> None:
        self._config = config
        self._max_tokens = max_tokens
        self._past: OrderedDict[Tenant, PastOutputs] = OrderedDict()  # the one used longest ago first
        self._own: dict[Request, TokenIndex] = {}

    @property
    def capacity(self) -> int:
        """Past tokens that memory is taken for."""
        return sum(past.capacity for past in self._past.values())

    def open(self, request: Request) -> bool:
        self._own[request] = TokenIndex(request.token_ids, _SIZE, request.max_tokens_total)
        return True

    def close(self, request: Request) -> None:
        if self._own.pop(request, None) is None:
            return
        outputs = request.token_ids[request.num_prompt_tokens :]
        if len(outputs) <= _SIZE:
            return
        tenant = _tenant(request)
        past = self._past.get(tenant)
        if past is None:
            most = self._config.suffix_decoding_max_cached_requests
            past = self._past[tenant] = PastOutputs(most, self._max_tokens)
        self._past.move_to_end(tenant)
        past.add(outputs)
        while len(self._past) > 1 and self.capacity > self._max_tokens:
            self._past.popitem(last=False)

    def propose(self, request: Request, num_in_flight: int, limit: int) -> list[int]:
        depth = self._config.suffix_decoding_max_tree_depth
        known = request.token_ids
        past = self._past.get(_tenant(request))
        indices = [self._own[request], *(generation.index for generation in (past.generations if past else ()))]
        longest, branches = 0, list[_Branch]()
        for index in indices:
            index.catch_up()
            for match in index.find(known, depth, _CANDIDATES):
                if match.length > longest:
                    longest, branches = match.length, []
                if match.length == longest:
                    branches.append((index.tokens, match.end))
        count = int(min(limit, self._config.suffix_decoding_max_spec_factor * longest))
        return _voted(branches, num_in_flight + count, self._config.suffix_decoding_min_token_prob)[num_in_flight:]


def _voted(branches: list[_Branch], count: int, least: float) -> list[int]:
    """Return what most branches go on with, at most `count` tokens; a token needs `least` of all votes."""
    chosen: list[int] = []
    num_votes = len(branches)
    for offset in range(count):
        votes = Counter(
            tokens[start + offset]
            for tokens, start in branches
            if start + offset < len(tokens) and tokens[start + offset] != _BETWEEN
        )
        if not votes:
            break
        token, share = votes.most_common(1)[0]
        if share < least * num_votes:
            break
        chosen.append(token)
        branches = [
            (tokens, start)
            for tokens, start in branches
            if start + offset < len(tokens) and tokens[start + offset] == token
        ]
    return chosen


def _tenant(request: Request) -> Tenant:
    return request.engine_request.tenant, request.engine_request.cache_salt
