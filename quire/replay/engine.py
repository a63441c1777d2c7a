"""The engine that replays a trace: of the same model, version and kernel path, or refused with what differs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.config import env
from quire.config.engine import EngineConfig
from quire.engine.build import make_conditions, make_grammars
from quire.engine.constraints import Constraints
from quire.engine.core import EngineCore
from quire.engine.trace.records import Header
from quire.loader.digest import model_digest
from quire.loader.hub import find_model
from quire.replay.steps import Comparison, ReplayedCore
from quire.replay.trace import Trace
from quire.types.errors import TraceError
from quire.utils.phases import ignore_phase
from quire.utils.version import VERSION
from quire.worker.executor import Executor
from quire.worker.registry import DEFAULT_EXECUTOR, EXECUTORS


def check_trace(trace: Trace, model: str | None = None) -> EngineConfig:
    """The settings to replay it with; TraceError if that cannot give the same bits. `model` is where it lies here."""
    header = trace.header
    if header.redacted:
        raise TraceError("the trace is redacted: it has no tokens to run; record one without --trace-redact")
    if not trace.is_whole:
        raise TraceError(
            "the beginning of the trace was rotated away, so that its engine's state is not known;"
            " record it with a larger --trace-size"
        )
    if header.version != VERSION:
        raise TraceError(
            f"the trace was recorded by Quire {header.version} and this is {VERSION}; install that version"
        )
    config = _config(header, model)
    digest = model_digest(find_model(config.model), config.model)
    if digest != header.model_digest:
        raise TraceError(
            f"the model {config.model.model!r} is not the recorded one (digest {digest}, recorded"
            f" {header.model_digest}); name the right one with --model"
        )
    return config


def make_executor(header: Header, config: EngineConfig) -> Executor:
    """Load the model on the recorded kernel path; TraceError if this machine has another one."""
    instructions = header.kernel_path.get("instruction_set")
    if instructions:
        env.use_cpu_instruction_set(instructions)
    executor = EXECUTORS.get(DEFAULT_EXECUTOR)(config, ignore_phase)
    found = executor.description.kernel_path
    for name, recorded in header.kernel_path.items():
        if found.get(name) != recorded:
            executor.shutdown()
            raise TraceError(
                f"the trace was recorded with {name} {recorded!r} and this machine has {found.get(name)!r}, which may"
                " give other bits; replay it on a machine that has the same"
            )
    blocks = tuple(executor.description.ledger.pool_blocks)
    if blocks != header.setup.pool_blocks:
        executor.shutdown()
        recorded_blocks = header.setup.pool_blocks
        raise TraceError(f"the trace was recorded with {recorded_blocks} KV blocks and there are {blocks} here")
    return executor


def make_replayed_core(header: Header, config: EngineConfig, executor: Executor, log: Comparison) -> ReplayedCore:
    """A core that takes its times, and what grammars force, from the trace."""
    grammars = make_grammars(config, executor, looks_ahead=False)
    return ReplayedCore(
        header.setup.make_scheduler(log.recorded_forced),
        executor,
        header.setup.steps_in_flight,
        Constraints(grammars),
        conditions=make_conditions(config, executor),
        log=log,
    )


def make_core(header: Header, config: EngineConfig, executor: Executor) -> EngineCore:
    """A core that plans its own steps."""
    grammars = make_grammars(config, executor)
    return EngineCore(
        header.setup.make_scheduler(grammars.forced),
        executor,
        header.setup.steps_in_flight,
        Constraints(grammars),
        conditions=make_conditions(config, executor),
    )


def _config(header: Header, model: str | None) -> EngineConfig:
    """The recorded settings, with all that was decided at start fixed to what it was."""
    config, setup, path = header.config, header.setup, header.kernel_path
    fixed: dict[str, Any] = {"max_model_len": setup.max_model_len, "quantization": path["quantization"]}
    fixed |= {"dtype": path["dtype"], "activations": path["activations"]} if config.model.dtype != "auto" else {}
    if model is not None:
        fixed["model"] = model
    cache = replace(config.cache, kv_cache_memory=setup.layout.num_bytes(setup.pool_blocks))
    scheduler = replace(
        config.scheduler,
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        long_prefill_token_threshold=setup.long_prefill_token_threshold,
        step_time_target=setup.step_time_target,
        steps_in_flight=setup.steps_in_flight,
    )
    device = replace(config.device, reserved_memory=0, attention_backend=path["attention_backend"])
    return replace(
        config,
        model=replace(config.model, **fixed),
        cache=cache,
        scheduler=scheduler,
        device=device,
        tracing=type(config.tracing)(),
    )
