"""The memory that engines will take: their ledgers, planned in another process, so that a server imports no torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from quire.config.engine import EngineConfig
from quire.config.env import child_environment, import_path
from quire.config.machines import CONTEXT_MEMORY
from quire.engine.spare import SPARE_MEMORY
from quire.types.errors import EngineStartError, QuireError
from quire.types.ledger import LedgerLine

PROCESS_MEMORY = SPARE_MEMORY  # of the host, for the code of an engine process


class PlanOrder(msgspec.Struct, frozen=True):
    configs: list[EngineConfig]
    memory_budget: int | None = None  # of the GPU, or of the host if no engine has a GPU; None: what is free
    host_memory_budget: int | None = None


class PlannedEngine(msgspec.Struct, frozen=True):
    """Bytes of all ranks where they share the host's memory, else of the rank that takes most."""

    on_host: bool
    weights: int = 0
    total: int = 0  # with KV blocks and all else
    kv_cache_memory: int = 0
    max_model_len: int = 0
    num_ranks: int = 1
    error: str | None = None  # why it cannot be planned

    def pinned(self, config: EngineConfig) -> EngineConfig:
        """The same settings with these sizes, whatever is free when the engine starts."""
        cache = replace(config.cache, kv_cache_memory=self.kv_cache_memory)
        return replace(config, cache=cache, model=replace(config.model, max_model_len=self.max_model_len))


class PlannedEngines(msgspec.Struct, frozen=True):
    engines: list[PlannedEngine]
    device: int | None  # bytes of the GPU for all engines; None: no engine has a GPU
    host: int


def plan_engines(
    configs: Sequence[EngineConfig], memory_budget: int | None, host_memory_budget: int | None
) -> PlannedEngines:
    """Plan each engine as if the whole budget were its own. Blocks for as long as a process imports torch."""
    order = PlanOrder(list(configs), memory_budget, host_memory_budget)
    return msgspec.json.decode(planned_by("quire.engine.footprint", order), type=PlannedEngines)


def planned_by(module: str, order: msgspec.Struct) -> bytes:
    """What a module says to an order, in a process of its own, which may import torch and use GPUs."""
    command, environment = (sys.executable, "-P", "-m", module), child_environment(**import_path())
    done = subprocess.run(
        command, input=msgspec.json.encode(order), stdout=subprocess.PIPE, env=environment, check=False
    )
    if done.returncode != 0:
        raise EngineStartError(f"memory cannot be planned: {module} ended with exit status {done.returncode}")
    return done.stdout


def make_plans(order: PlanOrder) -> PlannedEngines:
    """Imports torch."""
    from quire.planning.engine_plan import plan_memory
    from quire.platform.base import MemorySupply
    from quire.platform.limits import available_memory
    from quire.platform.registry import get_platform

    platforms = [get_platform(config.device.device) for config in order.configs]
    on_host = [platform.uses_host_memory for platform in platforms]
    free = available_memory().num_bytes
    host = (order.memory_budget if all(on_host) else order.host_memory_budget) or free
    device: int | None = None
    engines = []
    for config, platform, is_host in zip(order.configs, platforms, on_host, strict=True):
        supply = platform.available_memory(config.cache.gpu_memory_utilization).num_bytes
        if not is_host:
            device = device or order.memory_budget or supply
        count, each = on_host.count(is_host), PROCESS_MEMORY if is_host else CONTEXT_MEMORY
        processes = LedgerLine("engine processes", count * each, f"of {count} models")
        ranks, stages = config.parallel.num_ranks, range(config.parallel.pipeline_parallel_size)
        memory = host // ranks if is_host or device is None else device
        try:
            budget = MemorySupply(memory, "the budget of all models", "raise memory_budget or name fewer models")
            ledgers = [plan_memory(config, [processes], stage, supply=budget) for stage in stages]
        except QuireError as error:
            engines.append(PlannedEngine(is_host, error=str(error)))
            continue
        others = processes.num_bytes + config.device.reserved_memory
        weights = [ledger.entries[0].num_bytes for ledger in ledgers]
        totals = [ledger.total - others for ledger in ledgers]
        share = config.parallel.tensor_parallel_size
        engines.append(
            PlannedEngine(
                is_host,
                weights=share * sum(weights) if is_host else max(weights),
                total=share * sum(totals) if is_host else max(totals),
                kv_cache_memory=min(ledger.kv_bytes for ledger in ledgers),
                max_model_len=min(ledger.max_model_len for ledger in ledgers),
                num_ranks=ranks,
            )
        )
    return PlannedEngines(engines, device, host)


if __name__ == "__main__":
    found = make_plans(msgspec.json.decode(sys.stdin.buffer.read(), type=PlanOrder))
    sys.stdout.buffer.write(msgspec.json.encode(found))
