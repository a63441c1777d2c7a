"""EngineConfig: every setting of one engine, as the user gave them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields, replace
from datetime import date, datetime
from math import inf
from typing import Any, get_type_hints

from quire.config import env
from quire.config.groups import (
    CacheConfig,
    DeviceConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
    StructuredConfig,
    TracingConfig,
)
from quire.config.hosts import nth_address
from quire.config.speculative import check_speculative, read_speculative
from quire.config.typed import typed
from quire.types.errors import ConfigError
from quire.utils.units import parse_bytes

MAX_RANKS = 63  # of one host, see kernels/cpu/collectives.cpp
EXACT_SIZES = (1, 2, 4, 8)  # of tensor parallel whose sums can be made equal
MAX_THREADS = 1024  # with many more, a process that cannot start them all is ended by its own runtime


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    structured: StructuredConfig = field(default_factory=StructuredConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    @classmethod
    def from_flat(cls, **settings: Any) -> EngineConfig:
        """Build from flat keyword arguments, as LLM(...) and the CLI give them; an unknown name is an error."""
        groups: dict[str, Any] = {}
        left = dict(settings)
        for group in fields(cls):
            group_type = GROUP_TYPES[group.name]
            mine = {f.name: _checked(group_type, f, left.pop(f.name)) for f in fields(group_type) if f.name in left}
            groups[group.name] = group_type(**mine)
        if left:
            known = sorted(f.name for t in GROUP_TYPES.values() for f in fields(t))
            raise ConfigError(f"unknown setting {sorted(left)[0]!r}; known: {', '.join(known)}")
        config = cls(**groups)
        check(config)
        return config

    def of_replica(self, index: int, num_threads: int) -> EngineConfig:
        """The same for one engine of several: its trace, and its share of the threads or its address for workers."""
        own = replace(self, tracing=self.tracing.named(f"replica{index}"))
        if self.parallel.hosts_address is not None:
            address = nth_address(self.parallel.hosts_address, index)
            return replace(own, parallel=replace(self.parallel, data_parallel_size=1, hosts_address=address))
        device = replace(self.device, num_threads=self.device.num_threads or num_threads)
        size = self.parallel.data_parallel_size if self.parallel.shares_experts else 1
        return replace(own, device=device, parallel=replace(self.parallel, data_parallel_size=size))

    def with_sizes(self, tensor: int, stages: int, replicas: int = 1) -> EngineConfig:
        """The same with these parallel sizes, which have to be possible."""
        parallel = replace(
            self.parallel,
            parallel="manual",
            tensor_parallel_size=tensor,
            pipeline_parallel_size=stages,
            data_parallel_size=replicas,
        )
        found = replace(self, parallel=parallel)
        check(found)
        return found

    def with_replicas(self, count: int) -> EngineConfig:
        """The same with this number of replicas, which can be changed again."""
        found = replace(self, parallel=replace(self.parallel, data_parallel_size=count, elastic=True))
        check(found)
        return found

    def reserving(self, num_bytes: int) -> EngineConfig:
        """The same with more of the machine's memory left to others."""
        device = replace(self.device, reserved_memory=self.device.reserved_memory + num_bytes)
        return replace(self, device=device)

    def with_model(self, path: str) -> EngineConfig:
        """The same with another model, of which no revision is meant."""
        return replace(self, model=replace(self.model, model=path, revision=None))

    def keeping_dumps_in(self, folder: str) -> EngineConfig:
        """The same with this dump_dir, where none is set."""
        if self.tracing.dump_dir is not None:
            return self
        return replace(self, tracing=replace(self.tracing, dump_dir=folder))


GROUP_TYPES: dict[str, type[Any]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "device": DeviceConfig,
    "structured": StructuredConfig,
    "lora": LoRAConfig,
    "tracing": TracingConfig,
    "speculation": SpeculationConfig,
    "parallel": ParallelConfig,
}


def _checked(group_type: type[Any], setting: Field[Any], value: Any) -> Any:
    """The value, if it is of the setting's type; a path may stand for its text, "2GiB" for a number of bytes."""
    name = setting.name
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str) and setting.metadata["unit"] == "bytes":
        try:
            value = parse_bytes(value)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
    if name == "speculative_config" and value is not None:
        return read_speculative(value)
    return typed(name, value, get_type_hints(group_type)[name])


def check(config: EngineConfig) -> None:
    """Refuse values that are wrong whatever the model and machine are."""
    if not config.model.model:
        raise ConfigError("model is '' but must be a folder, a .gguf file, a hub id or a built-in alias")
    pinned_date(config.model)
    positive = {
        "max_model_len": config.model.max_model_len,
        "block_size": config.cache.block_size,
        "kv_cache_memory": config.cache.kv_cache_memory,
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "long_prefill_token_threshold": config.scheduler.long_prefill_token_threshold,
        "steps_in_flight": config.scheduler.steps_in_flight,
        "num_threads": config.device.num_threads,
        "structured_outputs_max_bytes": config.structured.structured_outputs_max_bytes,
        "structured_outputs_max_depth": config.structured.structured_outputs_max_depth,
        "structured_outputs_cache_size": config.structured.structured_outputs_cache_size,
        "max_loras": config.lora.max_loras,
        "max_lora_rank": config.lora.max_lora_rank,
        "max_cpu_loras": config.lora.max_cpu_loras,
        "trace_size": config.tracing.trace_size,
        "tensor_parallel_size": config.parallel.tensor_parallel_size,
        "pipeline_parallel_size": config.parallel.pipeline_parallel_size,
        "data_parallel_size": config.parallel.data_parallel_size,
        "decode_context_parallel_size": config.parallel.decode_context_parallel_size,
    }
    for name, value in positive.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value} but must be at least 1")
    _check_parallel(config)
    if config.device.reserved_memory < 0:
        raise ConfigError(f"reserved_memory is {config.device.reserved_memory} but must be at least 0")
    threads = config.device.num_threads
    if threads is not None and threads > MAX_THREADS:
        raise ConfigError(f"num_threads is {threads} but must be at most {MAX_THREADS}; as many as cores is usual")
    if config.scheduler.max_num_seqs is not None and config.scheduler.max_num_batched_tokens is not None:
        check_budget(config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens)
    target = config.scheduler.step_time_target
    if target is not None and not 0 <= target < inf:
        raise ConfigError(f"step_time_target is {target} but must be a number of seconds; 0 is no bound")
    timeout = config.structured.structured_outputs_compile_timeout
    if not timeout > 0:
        raise ConfigError(f"structured_outputs_compile_timeout is {timeout} but must be above 0")
    utilization = config.cache.gpu_memory_utilization
    if not 0 < utilization <= 1:
        raise ConfigError(f"gpu_memory_utilization is {utilization} but must be above 0 and at most 1; 0.9 is usual")
    if config.speculation.speculative_config is not None:
        check_speculative(config.speculation.speculative_config)
    block_size = config.cache.block_size
    if block_size & (block_size - 1) or block_size > 128:
        raise ConfigError(f"block_size is {block_size} but must be a power of two up to 128; 16 is a good value")


def _check_parallel(config: EngineConfig) -> None:
    parallel = config.parallel
    ranks = parallel.num_ranks
    if parallel.parallel == "auto":
        _check_auto(parallel)
    if ranks > MAX_RANKS:
        raise ConfigError(
            f"tensor_parallel_size times pipeline_parallel_size is {ranks} but an engine has at most {MAX_RANKS}"
            " ranks"
        )
    if parallel.executor == "inproc" and ranks > 1:
        raise ConfigError(
            f"executor is 'inproc' but {ranks} ranks need processes; leave it at auto, or set multiproc"
        )
    if (parallel.executor == "hosts") != (parallel.hosts_address is not None):
        raise ConfigError(
            f"executor is {parallel.executor!r} and hosts_address is {parallel.hosts_address!r}; workers join at an"
            " address, so set both: --executor hosts --hosts-address HOST:PORT"
        )
    if parallel.hosts_address is not None:
        nth_address(parallel.hosts_address, parallel.data_parallel_size - 1)
    if not parallel.join_timeout > 0:
        raise ConfigError(f"join_timeout is {parallel.join_timeout} but must be above 0")
    if parallel.tp_exact and parallel.tensor_parallel_size not in EXACT_SIZES:
        sizes = ", ".join(map(str, EXACT_SIZES))
        raise ConfigError(
            f"tensor_parallel_size is {parallel.tensor_parallel_size} but with tp_exact it must be one of {sizes}"
        )
    if parallel.shares_experts:
        _check_shared(config)
    elif parallel.enable_expert_parallel and parallel.tensor_parallel_size == 1 and parallel.parallel == "manual":
        raise ConfigError(
            "enable_expert_parallel needs several ranks to give experts to; set -tp 2 or more, or on a CPU -dp"
        )
    for name in ("num_redundant_experts", "all2all_backend", "enable_eplb"):
        value, default = getattr(parallel, name), getattr(ParallelConfig, name)
        if value != default and not parallel.enable_expert_parallel:
            raise ConfigError(
                f"{name} is {value!r}, which is for experts on several ranks; set --enable-expert-parallel"
            )
        if value != default and config.lora.lora_experts:
            raise ConfigError(f"{name} is {value!r}, which does not take adapters on experts; unset lora_experts")
    if parallel.num_redundant_experts < 0 or parallel.eplb_interval < 1:
        raise ConfigError(
            f"num_redundant_experts is {parallel.num_redundant_experts} and eplb_interval {parallel.eplb_interval},"
            " but they must be at least 0 and 1"
        )
    _check_contexts(config)
    _check_rows(parallel)
    if config.device.standby and (parallel.data_parallel_size > 1 or parallel.elastic):
        raise ConfigError("standby is for one engine; replicas stand in for each other, so leave it out")
    _ = config.lora.buckets  # are they what they should be?
    if parallel.tp_exact and config.lora.enable_lora:
        raise ConfigError("tp_exact does not take LoRA adapters, whose sums it does not fix; unset one of the two")


def _check_shared(config: EngineConfig) -> None:
    given, taken = vars(config.parallel) | vars(config.lora), dict[str, Sequence[object]]()
    taken |= {"pipeline_parallel_size": [1], "elastic": [False], "enable_eplb": [False], "num_redundant_experts": [0]}
    taken |= {
        "all2all_backend": ["all_to_all", "all_reduce"],
        "executor": ["inproc", "auto"],
        "lora_experts": [False],
    }
    taken |= {"data_parallel_size": range(1, MAX_RANKS + 1)}
    for name, values in taken.items():
        if given[name] not in values:
            raise ConfigError(
                f"{name} is {given[name]!r}, which replicas that share experts (-dp with --enable-expert-parallel) do"
                f" not take; set {values[-1]!r}, or leave --enable-expert-parallel out"
            )


def _check_auto(parallel: ParallelConfig) -> None:
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if (size := getattr(parallel, name)) > 1:
            raise ConfigError(f"parallel is 'auto' and {name} is {size}; leave one of the two out")
    if parallel.executor not in ("auto", "multiproc"):
        raise ConfigError(
            f"parallel is 'auto', which uses the GPUs of this machine, but executor is {parallel.executor!r}; set the"
            " sizes yourself, such as those of `quire fit --parallel auto --machine 2x8xh200`"
        )


def _check_contexts(config: EngineConfig) -> None:
    parallel, contexts = config.parallel, config.parallel.decode_context_parallel_size
    if parallel.tensor_parallel_size % contexts or config.cache.block_size % contexts:
        raise ConfigError(
            f"decode_context_parallel_size is {contexts} but must divide tensor_parallel_size"
            f" ({parallel.tensor_parallel_size}) and block_size ({config.cache.block_size})"
        )
    if parallel.tp_exact and contexts > 1:
        raise ConfigError("tp_exact does not fix sums over ranks that split a context; leave out -dcp or --tp-exact")


def _check_rows(parallel: ParallelConfig) -> None:
    threshold = parallel.sequence_parallel_threshold
    if threshold is not None and threshold < 0:
        raise ConfigError(f"sequence_parallel_threshold is {threshold} but must be at least 0; 0: no step is split")
    if threshold and parallel.tensor_parallel_size == 1 and parallel.parallel == "manual":
        raise ConfigError(
            f"sequence_parallel_threshold is {threshold}, but there is one tensor parallel rank, which holds all"
            " rows; set -tp 2 or more, or leave it out"
        )


def check_budget(num_seqs: int, budget: int) -> None:
    if num_seqs > budget:
        raise ConfigError(
            f"max_num_seqs is {num_seqs} but max_num_batched_tokens is only {budget}: every running request needs "
            f"a token in each step; set --max-num-batched-tokens to {num_seqs} or more"
        )


def pinned_date(config: ModelConfig) -> date | None:
    """The date that chat templates see instead of today's, if the settings or the environment say one."""
    name, text = "system_date", config.system_date
    if text is None:
        name, text = "QUIRE_SYSTEM_DATE", env.system_date()
    if text is None:
        return None
    try:
        return datetime.strptime(text, "%Y-%m-%d").date()
    except ValueError as error:
        raise ConfigError(f"{name} is {text!r} but must be a date such as 2026-01-31") from error
