"""Memory: what the parts of an engine say that they take, what there is, and the ledger of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch

from quire.attention.forms import AttentionBackends
from quire.config.engine import EngineConfig
from quire.kv.layout import KVLayout, plan_layout
from quire.layers.attention import CachedLayer
from quire.models.base import Model
from quire.parallel.groups import ParallelGroup
from quire.parallel.pipeline import Pipeline
from quire.planning.drafting import drafter_context, head_lines
from quire.planning.ledger import MemoryDemand, MemoryLedger, make_ledger
from quire.platform.base import MemorySupply, Platform
from quire.runner.adapters import host_line, slots_line
from quire.runner.request_rows import BlockTables, RequestRows
from quire.runner.sampling.sampler import Sampler
from quire.runner.stages import StageInputs
from quire.runner.ways import WAYS, WayContext
from quire.types.cache import LayerKV
from quire.types.errors import ConfigError
from quire.types.ledger import Contributor, LedgerLine, largest

# What takes memory besides weights, KV blocks, attention and the ways to run: each says its own lines of the ledger.
PARTS: tuple[Contributor, ...] = (RequestRows, BlockTables, Sampler)


def contributions(context: WayContext) -> tuple[LedgerLine, ...]:
    """What the parts of an engine say that they take, weights and KV blocks apart."""
    model, sizes, of_drafter = context.model, context.sizes, drafter_context(context)
    layers = (
        context.backends.of(layer.keeps.form).contributes(layer.spec, sizes) for layer in model.attention_layers()
    )
    lines = chain(
        *(part.contributes(sizes) for part in (*PARTS, model) if part is not Sampler or not context.passes_on),
        StageInputs.contributes(sizes) if context.receives else (),
        slots_line(model),
        largest(chain(*layers)),
        *(WAYS.get(name).contributes(context) for name in WAYS),
        *(() if of_drafter is None else (WAYS.get(name).contributes(of_drafter) for name in WAYS)),
        () if of_drafter is None else head_lines(of_drafter),
    )
    return tuple(line for line in lines if line.num_bytes)


def buffer_bytes(model: Model) -> int:
    """What layers keep beside their weights: tables, not the slots of adapters, which have their own line."""
    return sum(buffer.nbytes for buffer in model.buffers()) - sum(line.num_bytes for line in slots_line(model))


def standby_line(platform: Platform, lines: Sequence[LedgerLine]) -> LedgerLine:
    """What a second engine takes that has loaded: KV blocks when it computes, and this engine is gone by then."""
    if not platform.uses_host_memory:
        raise ConfigError(
            "--standby is for engines on a CPU: two engines do not share one GPU's memory; leave it out"
        )
    total = sum(line.num_bytes for line in lines)
    return LedgerLine("standby engine", total, "a second process of `quire serve`, loaded and idle")


def other_lines(config: EngineConfig, others: Sequence[LedgerLine], model: Model) -> tuple[LedgerLine, ...]:
    """What is taken of the host's memory beside the engine's own tensors."""
    reserved = LedgerLine("reserved", config.device.reserved_memory, "left to other processes")
    adapters = [host_line(model, config.lora)] if config.lora.enable_lora else []
    return tuple(line for line in (reserved, *others, *adapters) if line.num_bytes)


def memory_supply(config: EngineConfig, platform: Platform, group: ParallelGroup, pipeline: Pipeline) -> MemorySupply:
    num_ranks = group.size * pipeline.size
    supply = platform.available_memory(config.cache.gpu_memory_utilization)
    if not platform.uses_host_memory or num_ranks == 1:
        return supply
    # Ranks come at the same time, and each looks at the whole.
    return supply._replace(num_bytes=supply.num_bytes // num_ranks, bound=f"{supply.bound}, shared by ranks")


def shared_ledger(
    config: EngineConfig,
    platform: Platform,
    demand: MemoryDemand,
    supply: MemorySupply,
    group: ParallelGroup,
    pipeline: Pipeline,
) -> MemoryLedger:
    one_request = demand.kv_bytes(config.model.max_model_len or demand.trained_len)
    mine = make_ledger(
        demand,
        supply,
        config.cache.kv_cache_memory,
        platform.default_kv_memory(supply.num_bytes - demand.fixed, one_request),
        config.model.max_model_len,
    )
    ranks = group.collectives if pipeline.size == 1 else pipeline.world
    length, *blocks = ranks.minimum([mine.max_model_len, *mine.pool_blocks])
    if (length, *blocks) == (mine.max_model_len, *mine.pool_blocks):
        return mine
    return replace(
        mine,
        entries=demand.entries(blocks),
        max_model_len=length,
        pool_blocks=tuple(blocks),
        kv_reason="as many as the rank has that can keep fewest",
    )


def kv_layout(
    layers: Sequence[CachedLayer], backends: AttentionBackends, dtype: torch.dtype, block_size: int
) -> KVLayout:
    """What these layers keep, with the sizes that the caches of the backends have."""

    def sized(layer: CachedLayer) -> LayerKV:
        keeps = layer.keeps
        block_bytes = math.prod(layer.cache_shape(backends.of(keeps.form), 1, block_size, dtype)) * dtype.itemsize
        return keeps if keeps.bytes_per_row else replace(keeps, bytes_per_token=block_bytes // block_size)

    return plan_layout([sized(layer) for layer in layers], block_size)
