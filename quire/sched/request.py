"""Request: what the scheduler remembers about one EngineRequest from its arrival to its end."""

from __future__ import annotations

from enum import IntEnum

from quire.kv.manager import KVSequence
from quire.sched.repetition import RepetitionDetector
from quire.types.request import EngineRequest
from quire.types.sampling import PoolingParams

# A request's place in the order of service: smaller runs earlier and is preempted later.
OrderKey = tuple[int, int]


class Status(IntEnum):
    WAITING = 0  # in the waiting queue: new, or preempted
    RUNNING = 1  # owns a row and blocks
    FINISHED = 2


CAUGHT_UP = 1 << 62


class Request:
    """Counts exist twice, because steps are planned before it is known how many tokens those before them give.

    `num_tokens` and `num_computed_tokens` are upper bounds: if every token in flight holds. Planning uses them.
    `token_ids` and `num_certain_tokens` are what results have confirmed; blocks are let go and cached by these.
    """

    __slots__ = (
        "__weakref__",
        "capacity",
        "constrained",
        "engine_request",
        "key",
        "kv",
        "max_tokens_total",
        "min_tokens_total",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_confirmed_tokens",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_tokens",
        "pools",
        "pools_last",
        "queue_time",
        "repetition",
        "reported",
        "request_id",
        "retry_until",
        "row",
        "status",
        "steady",
        "stop_token_ids",
        "stop_tokens",
        "store_above",
        "token_ids",
        "wants_prompt_logprobs",
        "wants_routed_experts",
    )

    def __init__(self, engine_request: EngineRequest, kv: KVSequence, key: OrderKey, max_model_len: int) -> None:
        params = engine_request.params
        num_prompt_tokens = len(engine_request.token_ids) - engine_request.num_given_outputs
        self.request_id = engine_request.request_id
        self.engine_request = engine_request
        self.kv = kv
        self.key = key
        self.status = Status.WAITING
        self.row = -1

        self.token_ids = engine_request.token_ids.copy()  # the known tokens: prompt, then outputs
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = len(self.token_ids)
        self.num_computed_tokens = 0  # as of the newest planned step
        self.num_confirmed_tokens = 0  # by the results of chunks; CAUGHT_UP since it has sampled
        self.capacity = 0  # tokens that the blocks held now have room for
        self.store_above = 0  # more known tokens than this: a block is full and can be cached

        self.constrained = engine_request.grammar is not None
        self.pools = isinstance(params, PoolingParams)
        self.pools_last = isinstance(params, PoolingParams) and params.pooling == "last"
        self.repetition: RepetitionDetector | None = None
        if isinstance(params, PoolingParams):
            self.max_tokens_total = num_prompt_tokens + 1
            self.min_tokens_total = 0
            self.stop_token_ids: tuple[int, ...] = ()
            self.stop_tokens: frozenset[int] = frozenset()
            self.wants_prompt_logprobs = self.wants_routed_experts = False
        else:
            self.max_tokens_total = min(num_prompt_tokens + engine_request.max_tokens, max_model_len)
            self.min_tokens_total = num_prompt_tokens + params.min_tokens
            eos = () if params.ignore_eos else engine_request.eos_token_ids
            self.stop_token_ids = params.stop_token_ids
            self.stop_tokens = frozenset(params.stop_token_ids).union(eos)  # whatever ends it
            self.wants_prompt_logprobs = params.prompt_logprobs is not None
            self.wants_routed_experts = params.return_routed_experts
            detection = params.repetition_detection
            if detection is not None and detection.max_pattern_size > 0:
                self.repetition = RepetitionDetector(detection)
                for token in self.token_ids[num_prompt_tokens:]:
                    self.repetition.add(token)

        # True when a result row needs nothing but: append one token, check for the end.
        self.steady = False
        self.num_cached_tokens = -1  # prompt tokens found in the prefix cache at the first admission
        self.queue_time: float | None = None  # seconds from arrival to the first admission
        self.reported = False  # the first output has been made
        # Prompt logprobs given out so far; they cover tokens 1..n. An output comes after all of them.
        self.num_prompt_logprobs = num_prompt_tokens - 1 if engine_request.num_given_outputs else 0
        self.num_preemptions = 0
        self.retry_until = 0  # runs alone until this many tokens are computed; 0: runs with others

    @property
    def num_pending(self) -> int:
        """Sampled tokens that are in flight, if all of them hold."""
        return self.num_tokens - len(self.token_ids)

    @property
    def num_certain_tokens(self) -> int:
        """Computed tokens that no result can take back, and that no step in flight computes."""
        confirmed, known = self.num_confirmed_tokens, len(self.token_ids) - 1
        return confirmed if confirmed < known else known

    @property
    def may_reuse_prefix(self) -> bool:
        """Logprobs, routed experts and most pooling are of tokens that a prefix hit would not compute."""
        if self.pools:
            return self.pools_last
        if self.wants_routed_experts:
            return False
        return not self.wants_prompt_logprobs or self.num_prompt_logprobs >= self.num_prompt_tokens - 1

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.name}, row={self.row}, "
            f"tokens={self.num_tokens}, computed={self.num_computed_tokens})"
        )
