"""What is simulated: requests of given lengths at a given rate, or those of a trace. Imports no torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf

from msgspec.structs import replace

from quire.bench.load import arrival_times
from quire.engine.trace.records import TookRedacted, may_reuse_prefix
from quire.kv.hashing import root_hash
from quire.replay.trace import Trace
from quire.replay.turns import recorded_outputs, turns
from quire.types.errors import ConfigError
from quire.types.request import EngineRequest
from quire.types.sampling import PoolingParams, SamplingParams

Arrivals = Iterator[tuple[float, Callable[[], EngineRequest]]]

_FILLER = 11  # a token of prompts that share nothing but their length
_TOKENS = 1 << 15


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests that are made up. Lengths vary evenly between 1 - range_ratio and 1 + range_ratio of those given."""

    num_prompts: int = 1000
    input_len: int = 128
    output_len: int = 64
    range_ratio: float = 0.0
    prefix_len: int = 0
    """Tokens of each prompt that it shares with others."""
    num_prefixes: int = 1
    request_rate: float = inf
    max_concurrency: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len", "num_prefixes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)} but must be at least 1")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"--range-ratio is {self.range_ratio:g} but must be at least 0 and below 1")
        if not 0 <= self.prefix_len < self.input_len:
            raise ConfigError(f"--prefix-len is {self.prefix_len} but must be below --input-len {self.input_len}")
        if not self.request_rate > 0:
            raise ConfigError(f"--request-rate is {self.request_rate:g} but must be above 0")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"--max-concurrency is {self.max_concurrency} but must be at least 1")

    def arrivals(self) -> Arrivals:
        if self.request_rate == inf:
            due: Iterator[float] = iter(lambda: 0.0, None)
        else:
            due = iter(arrival_times(self.num_prompts, self.request_rate, seed=self.seed))
        draw = random.Random(f"plan/{self.seed}")
        for index in range(self.num_prompts):
            yield next(due), self._maker(index, draw)

    def _maker(self, index: int, draw: random.Random) -> Callable[[], EngineRequest]:
        num_inputs, num_outputs = self._length(self.input_len, draw), self._length(self.output_len, draw)

        def make() -> EngineRequest:
            own = max(1, num_inputs - self.prefix_len)
            # Three digits of the index, so that no two prompts are equal: hashing is as costly as it really is.
            name = [index % _TOKENS, index // _TOKENS % _TOKENS, _FILLER][:own]
            prefix = [_TOKENS + index % self.num_prefixes] * min(self.prefix_len, num_inputs - own)
            token_ids = prefix + name + [_FILLER] * (own - len(name))
            return simulated(str(index), token_ids, num_outputs)

        return make

    def _length(self, middle: int, draw: random.Random) -> int:
        if not self.range_ratio:
            return middle
        return draw.randint(
            max(1, int(middle * (1 - self.range_ratio))), max(1, int(middle * (1 + self.range_ratio)))
        )


def simulated(
    name: str, token_ids: list[int], num_outputs: int, priority: int = 0, cache_salt: str | None = None
) -> EngineRequest:
    """A request that gives exactly this many tokens."""
    return EngineRequest(
        request_id=name,
        token_ids=token_ids,
        params=SamplingParams(max_tokens=num_outputs, ignore_eos=True),
        max_tokens=num_outputs,
        priority=priority,
        cache_salt=cache_salt,
    )


def trace_arrivals(trace: Trace) -> Arrivals:
    """The requests of a trace when they came, each with as many outputs as it was given then.

    Of a trace whose beginning is gone, the load begins with the first request that is left.
    """
    given = {name: len(ids) for name, ids in recorded_outputs(trace.records()).items()}
    block_size = trace.header.setup.layout.block_size
    began: float | None = 0.0 if trace.is_whole else None
    for turn in turns(trace.records()):
        for took in turn.took:
            if isinstance(took, TookRedacted):
                make = _redacted_maker(took, given.get(took.request_id, 1), block_size)
            elif isinstance(took.message, EngineRequest):
                make = _recorded_maker(took.message, given.get(took.message.request_id, 1))
            else:
                continue
            began = took.at if began is None else began
            yield took.at - began, make


def _recorded_maker(request: EngineRequest, num_outputs: int) -> Callable[[], EngineRequest]:
    """Requests share cached prefixes as the recorded ones did; an adapter is no more than a salt of them here."""

    def make() -> EngineRequest:
        salt = root_hash(request).hex() if may_reuse_prefix(request.params) else request.request_id
        made = simulated(request.request_id, request.token_ids, max(1, num_outputs), request.priority, salt)
        return replace(made, params=request.params) if isinstance(request.params, PoolingParams) else made

    return make


def _redacted_maker(took: TookRedacted, num_outputs: int, block_size: int) -> Callable[[], EngineRequest]:
    """Equal prefix hashes become equal tokens, so that prefix hits are those of the recorded requests."""

    def make() -> EngineRequest:
        token_ids = [int.from_bytes(h[:3], "little") for h in took.prefix_hashes for _ in range(block_size)]
        rest = took.num_tokens - len(token_ids)
        own = int.from_bytes(took.request_id.encode()[:3], "little")
        salt = None if took.may_reuse_prefix else took.request_id
        made = simulated(took.request_id, token_ids + [own] * rest, max(1, num_outputs), took.priority, salt)
        if not took.pools:
            return made
        return replace(made, params=PoolingParams(pooling="last" if took.may_reuse_prefix else "mean"))

    return make
