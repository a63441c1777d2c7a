"""Request: what the scheduler remembers about one EngineRequest from its arrival to its end."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
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


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Request:
    """Counts exist twice, because steps are planned before it is known how many tokens those before them give.

    `num_tokens` and `num_computed_tokens` are upper bounds: if every token in flight holds. Planning uses them.
    `token_ids` and `num_certain_tokens` are what results have confirmed; blocks are let go and cached by these.
    """

    engine_request: EngineRequest
    kv: KVSequence
    key: OrderKey
    max_model_len: InitVar[int]
    request_id: str = field(init=False)
    token_ids: list[int] = field(init=False)  # the known tokens: prompt, then outputs
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)
    max_tokens_total: int = field(init=False)
    constrained: bool = field(init=False)
    pools: bool = field(init=False)
    num_prompt_logprobs: int = field(init=False)
    """Prompt logprobs given out so far; they cover tokens 1..n. An output comes after all of them."""
    status: Status = Status.WAITING
    row: int = -1
    num_computed_tokens: int = 0  # as of the newest planned step
    num_confirmed_tokens: int = 0  # by the results of chunks; CAUGHT_UP since it has sampled
    capacity: int = 0  # tokens that the blocks held now have room for
    store_above: int = 0  # more known tokens than this: a block is full and can be cached
    pools_last: bool = False
    min_tokens_total: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_tokens: frozenset[int] = frozenset()  # whatever ends it
    wants_prompt_logprobs: bool = False
    wants_routed_experts: bool = False
    repetition: RepetitionDetector | None = None
    steady: bool = False  # a result row needs nothing but: append one token, check for the end
    num_cached_tokens: int = -1  # prompt tokens found in the prefix cache at the first admission
    num_without_state: int = 0  # prompt tokens behind those that were cached, but for a state to go on from
    queue_time: float | None = None  # seconds from arrival to the first admission
    reported: bool = False  # the first output has been made
    num_preemptions: int = 0
    retry_until: int = 0  # runs alone until this many tokens are computed; 0: runs with others

    def __post_init__(self, max_model_len: int) -> None:
        source, params = self.engine_request, self.engine_request.params
        self.request_id, self.token_ids = source.request_id, source.token_ids.copy()
        self.num_tokens = len(self.token_ids)
        self.num_prompt_tokens = prompt = self.num_tokens - source.num_given_outputs
        self.num_prompt_logprobs = prompt - 1 if source.num_given_outputs else 0
        self.constrained, self.pools = source.grammar is not None, isinstance(params, PoolingParams)
        if isinstance(params, PoolingParams):
            self.pools_last, self.max_tokens_total = params.pooling == "last", prompt + 1
            return
        self.max_tokens_total = min(prompt + source.max_tokens, max_model_len)
        self.min_tokens_total = prompt + params.min_tokens
        self.stop_token_ids = params.stop_token_ids
        self.stop_tokens = frozenset(params.stop_token_ids).union(() if params.ignore_eos else source.eos_token_ids)
        self.wants_prompt_logprobs = params.prompt_logprobs is not None
        self.wants_routed_experts = params.return_routed_experts
        detection = params.repetition_detection
        if detection is not None and detection.max_pattern_size > 0:
            self.repetition = RepetitionDetector(detection)
            for token in self.token_ids[prompt:]:
                self.repetition.add(token)

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
