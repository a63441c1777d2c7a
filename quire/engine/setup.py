"""SchedulerSetup: all numbers that a scheduler and its KV manager are made of. Imports no torch.

The engine makes one from what its worker says; a trace keeps it, so that replay and simulation plan the same steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from quire.config.groups import SpeculativeConfig
from quire.kv.layout import KVLayout
from quire.kv.manager import KVCacheManager
from quire.sched.adapters import AdapterSlots
from quire.sched.drafters.forced import Forced, nothing_forced
from quire.sched.drafters.registry import make_drafting
from quire.sched.scheduler import Scheduler
from quire.sched.shares import WholePrompts
from quire.sched.state import Limits
from quire.sched.step_times import Prior, StepTimes
from quire.sched.time_shares import make_shares


@dataclass(frozen=True, kw_only=True)
class SchedulerSetup:
    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    policy: str
    max_model_len: int
    layout: KVLayout
    pool_blocks: tuple[int, ...]
    caches_prefixes: bool
    takes_whole_prompts: bool
    step_time_target: float
    performance_mode: str
    step_times: tuple[float, float, float, float]
    step_sizes: tuple[int, ...]
    steps_in_flight: int
    adapter_slots: tuple[tuple[int, int], ...] = ()  # (rank, slots of it); none: adapters are not served
    max_num_drafts: int = 0  # of a step
    speculative: SpeculativeConfig | None = None
    num_stages: int = 1  # of a pipeline
    query_tile: int = 1  # queries that a kernel of attention computes together

    def make_scheduler(self, forced: Callable[[str], Forced] = nothing_forced) -> Scheduler:
        """`forced` tells what a request's grammar leaves no choice about."""
        prior = Prior(*self.step_times)
        return Scheduler(
            Limits(**{limit.name: getattr(self, limit.name) for limit in fields(Limits)}),
            policy=self.policy,
            kv=KVCacheManager(self.layout, self.pool_blocks, self.caches_prefixes),
            shares=WholePrompts()
            if self.takes_whole_prompts
            else make_shares(
                self.step_time_target, self.performance_mode, StepTimes(prior, self.step_sizes, self.query_tile)
            ),
            adapters=AdapterSlots(self.adapter_slots) if self.adapter_slots else None,
            drafting=make_drafting(self.speculative, StepTimes(prior), forced),
        )
