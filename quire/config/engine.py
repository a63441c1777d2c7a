"""EngineConfig: every setting of one engine, as the user gave them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from quire.config.groups import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig
from quire.types.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)

    @classmethod
    def from_flat(cls, **settings: Any) -> EngineConfig:
        """Build from flat keyword arguments, as LLM(...) and the CLI give them; an unknown name is an error."""
        groups: dict[str, Any] = {}
        left = dict(settings)
        for group in fields(cls):
            group_type = GROUP_TYPES[group.name]
            mine = {f.name: left.pop(f.name) for f in fields(group_type) if f.name in left}
            groups[group.name] = group_type(**mine)
        if left:
            known = sorted(f.name for t in GROUP_TYPES.values() for f in fields(t))
            raise ConfigError(f"unknown setting {sorted(left)[0]!r}; known: {', '.join(known)}")
        config = cls(**groups)
        check(config)
        return config


GROUP_TYPES: dict[str, type[Any]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "device": DeviceConfig,
}


def check(config: EngineConfig) -> None:
    """Refuse values that are wrong whatever the model and machine are."""
    positive = {
        "max_model_len": config.model.max_model_len,
        "block_size": config.cache.block_size,
        "kv_cache_memory": config.cache.kv_cache_memory,
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "long_prefill_token_threshold": config.scheduler.long_prefill_token_threshold,
        "steps_in_flight": config.scheduler.steps_in_flight,
        "num_threads": config.device.num_threads,
    }
    for name, value in positive.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value} but must be at least 1")
    block_size = config.cache.block_size
    if block_size & (block_size - 1) or block_size > 128:
        raise ConfigError(f"block_size is {block_size} but must be a power of two up to 128; 16 is a good value")
