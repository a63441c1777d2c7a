"""Wires one engine: executor, KV manager, scheduler, core."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from quire.config.engine import EngineConfig
from quire.config.env import debug_checks
from quire.config.groups import StructuredConfig
from quire.engine.adapters import AdapterReader
from quire.engine.constraints import Constraints
from quire.engine.core import EngineCore
from quire.engine.flight import FlightInfo, make_flight_recorder
from quire.engine.parked import Condition
from quire.engine.setup import SchedulerSetup
from quire.engine.step_log import NO_LOG, StepLog, join_logs
from quire.engine.trace.recorder import make_recorder
from quire.loader.digest import model_digest
from quire.loader.hub import find_model
from quire.sched.drafters.forced import Forced
from quire.structured.manager import GrammarManager
from quire.structured.registry import check_backend
from quire.types.console import Memory, MemoryLine
from quire.types.errors import ConfigError
from quire.types.messages import EngineInfo
from quire.types.structured import GrammarLimits
from quire.utils.phases import ReportPhase, ignore_phase
from quire.utils.version import VERSION
from quire.worker.description import WorkerDescription
from quire.worker.executor import Executor
from quire.worker.registry import EXECUTORS, executor_of

_LOOK_AHEAD = 8  # tokens that are forced one after the other and become drafts


def build_engine(
    config: EngineConfig, report: ReportPhase = ignore_phase, executor_name: str | None = None
) -> tuple[EngineCore, EngineInfo, bool]:
    """The core, what the frontend needs to know about it, and whether to check integrity when idle."""
    replicas = config.parallel.data_parallel_size
    if replicas > 1 and not config.parallel.shares_experts:
        raise ConfigError(f"data_parallel_size is {replicas}, but this is one engine; `quire serve` runs several")
    limits = grammar_limits(config.structured)  # first: what it refuses need not wait for weights
    executor = EXECUTORS.get(executor_name or executor_of(config))(config, report)
    worker = executor.description
    settings, ledger = worker.settings, worker.ledger
    setup = scheduler_setup(config, worker)
    grammars = make_grammars(config, executor)
    log = _step_log(config, setup, worker.kernel_path)
    core = EngineCore(
        setup.make_scheduler(_noted(grammars.forced, log)),
        executor,
        settings.steps_in_flight,
        Constraints(grammars),
        conditions=make_conditions(config, executor),
        log=log,
        memory=Memory([MemoryLine(e.name, e.num_bytes, e.note) for e in ledger.entries], ledger.supply.num_bytes),
    )
    info = EngineInfo(
        vocab_size=worker.vocab_size,
        max_model_len=ledger.max_model_len,
        block_size=config.cache.block_size,
        num_kv_blocks=ledger.num_kv_blocks,
        max_num_seqs=settings.max_num_seqs,
        grammar_limits=limits,
        architecture=worker.architecture,
        pooler=worker.pooler,
        routes=worker.routes,
        takes_adapters=config.lora.enable_lora,
        prompt_embeds_size=worker.hidden_size if config.model.enable_prompt_embeds else 0,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        releases_blocks=any(group.rule(1).releases for group in ledger.layout.groups),
    )
    return core, info, debug_checks()


def scheduler_setup(config: EngineConfig, worker: WorkerDescription) -> SchedulerSetup:
    """What the settings and the worker make of a scheduler."""
    settings, ledger = worker.settings, worker.ledger
    return SchedulerSetup(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        policy=config.scheduler.policy,
        max_model_len=ledger.max_model_len,
        layout=ledger.layout,
        pool_blocks=tuple(ledger.pool_blocks),
        # Keys and values of a token that sees those after it are of no use to another prompt.
        caches_prefixes=config.cache.enable_prefix_caching and not worker.is_bidirectional,
        takes_whole_prompts=worker.is_bidirectional,
        step_time_target=settings.step_time_target,
        performance_mode=config.scheduler.performance_mode,
        step_times=worker.step_times,
        step_sizes=tuple(worker.step_sizes),
        query_tile=worker.query_tile,
        steps_in_flight=settings.steps_in_flight,
        adapter_slots=config.lora.buckets if config.lora.enable_lora else (),
        max_num_drafts=settings.max_num_drafts,
        speculative=config.speculation.speculative_config,
        num_stages=config.parallel.pipeline_parallel_size,
    )


def make_grammars(config: EngineConfig, executor: Executor, *, looks_ahead: bool = True) -> GrammarManager:
    return GrammarManager(
        grammar_limits(config.structured),
        config.structured.structured_outputs_cache_size,
        executor.mask_room,
        look_ahead=_LOOK_AHEAD if looks_ahead and executor.description.settings.jumps_forward else 0,
    )


def _noted(forced: Callable[[str], Forced], log: StepLog) -> Callable[[str], Forced]:
    def read(request_id: str) -> Forced:
        found = forced(request_id)
        if found[1]:
            log.forced(request_id, found)
        return found

    return read


def make_conditions(config: EngineConfig, executor: Executor) -> list[Condition]:
    """What requests may have to wait for, besides their grammars."""
    return [AdapterReader(executor, config.lora.num_in_host_memory)] if config.lora.enable_lora else []


def _step_log(config: EngineConfig, setup: SchedulerSetup, kernel_path: dict[str, str]) -> StepLog:
    """What the settings ask for: a trace, the last steps, both or nothing."""
    trace: StepLog = NO_LOG
    if config.tracing.trace is not None:
        digest = model_digest(find_model(config.model), config.model)
        trace = make_recorder(config, setup, digest, kernel_path)
    return join_logs(trace, flight_log(config, setup.max_num_seqs))


def flight_log(config: EngineConfig, max_num_seqs: int) -> StepLog:
    if config.tracing.dump_dir is None:
        return NO_LOG
    info = FlightInfo(os.getpid(), time.time(), max_num_seqs, config.model.model, VERSION)
    return make_flight_recorder(Path(config.tracing.dump_dir).expanduser(), info) or NO_LOG


def grammar_limits(config: StructuredConfig) -> GrammarLimits:
    name = config.structured_outputs_backend
    check_backend(name)
    return GrammarLimits(
        name,
        config.structured_outputs_max_bytes,
        config.structured_outputs_max_depth,
        config.structured_outputs_compile_timeout,
    )
