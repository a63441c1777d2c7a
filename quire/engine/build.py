"""Wires one engine: executor, KV manager, scheduler, core."""

from __future__ import annotations

from quire.config.engine import EngineConfig
from quire.config.env import debug_checks
from quire.config.groups import StructuredConfig
from quire.engine.adapters import AdapterReader
from quire.engine.constraints import Constraints
from quire.engine.core import EngineCore
from quire.kv.manager import KVCacheManager
from quire.sched.adapters import AdapterSlots
from quire.sched.drafters.make import make_drafting
from quire.sched.scheduler import Scheduler
from quire.sched.shares import WholePrompts
from quire.sched.step_times import Prior, StepTimes
from quire.sched.time_shares import make_shares
from quire.structured.manager import GrammarManager
from quire.structured.registry import check_backend
from quire.types.messages import EngineInfo
from quire.types.structured import GrammarLimits
from quire.utils.phases import ReportPhase, ignore_phase
from quire.worker.registry import DEFAULT_EXECUTOR, EXECUTORS

_LOOK_AHEAD = 8  # tokens that are forced one after the other and become drafts


def build_engine(
    config: EngineConfig, report: ReportPhase = ignore_phase, executor_name: str = DEFAULT_EXECUTOR
) -> tuple[EngineCore, EngineInfo, bool]:
    """The core, what the frontend needs to know about it, and whether to check integrity when idle."""
    limits = grammar_limits(config.structured)  # first: what it refuses need not wait for weights
    executor = EXECUTORS.get(executor_name)(config, report)
    worker = executor.description
    settings, ledger = worker.settings, worker.ledger
    # Keys and values of a token that sees those after it are of no use to another prompt.
    caches = config.cache.enable_prefix_caching and not worker.is_bidirectional
    kv = KVCacheManager(ledger.layout, ledger.pool_blocks, caches)
    speculative = config.speculation.speculative_config
    grammars = GrammarManager(
        limits,
        config.structured.structured_outputs_cache_size,
        executor.mask_room,
        look_ahead=0 if speculative is None or speculative.method == "none" else _LOOK_AHEAD,
    )
    prior = Prior(*worker.step_times)
    scheduler = Scheduler(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        policy=config.scheduler.policy,
        max_model_len=ledger.max_model_len,
        max_num_drafts=settings.max_num_drafts,
        kv=kv,
        shares=WholePrompts()
        if worker.is_bidirectional
        else make_shares(
            settings.step_time_target,
            config.scheduler.performance_mode,
            StepTimes(prior, worker.step_sizes),
        ),
        adapters=AdapterSlots(config.lora.max_loras) if config.lora.enable_lora else None,
        drafting=make_drafting(speculative, StepTimes(prior), grammars.forced),
    )
    conditions = [AdapterReader(executor, config.lora.max_cpu_loras)] if config.lora.enable_lora else []
    core = EngineCore(scheduler, executor, settings.steps_in_flight, Constraints(grammars), conditions=conditions)
    info = EngineInfo(
        vocab_size=worker.vocab_size,
        max_model_len=ledger.max_model_len,
        block_size=config.cache.block_size,
        num_kv_blocks=ledger.num_kv_blocks,
        max_num_seqs=settings.max_num_seqs,
        grammar_limits=limits,
        architecture=worker.architecture,
        pooler=worker.pooler,
        takes_adapters=config.lora.enable_lora,
        prompt_embeds_size=worker.hidden_size if config.model.enable_prompt_embeds else 0,
    )
    return core, info, debug_checks()


def grammar_limits(config: StructuredConfig) -> GrammarLimits:
    name = config.structured_outputs_backend
    check_backend(name)
    return GrammarLimits(
        name,
        config.structured_outputs_max_bytes,
        config.structured_outputs_max_depth,
        config.structured_outputs_compile_timeout,
    )
