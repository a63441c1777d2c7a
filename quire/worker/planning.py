"""Before anything is loaded: find the model, resolve the settings, and write the memory ledger.

This is all that `quire fit` runs; the worker runs the same and then takes what the ledger says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from quire.attention.base import AttentionBackend
from quire.attention.registry import BACKENDS
from quire.config.engine import EngineConfig
from quire.config.resolve import DeviceDefaults, ResolvedConfig, resolve
from quire.kv.layout import KVLayout, LayerKV, plan_layout
from quire.layers.linear import Linear
from quire.loader.hub import ModelSource, resolve_model
from quire.loader.model_config import load_config
from quire.models.base import BuildContext, CausalLM
from quire.models.registry import ModelDescription, describe, model_class
from quire.platform.base import Platform
from quire.platform.registry import get_platform
from quire.types.errors import ConfigError
from quire.worker.ledger import MemoryDemand, MemoryLedger, make_ledger


@dataclass(frozen=True)
class EnginePlan:
    """Everything decided before a byte of weights is read."""

    platform: Platform
    source: ModelSource
    model_config: dict[str, Any]
    description: ModelDescription
    settings: ResolvedConfig
    dtype: torch.dtype
    backend: AttentionBackend
    ledger: MemoryLedger

    @property
    def context(self) -> BuildContext:
        return BuildContext(dtype=self.dtype, max_model_len=self.ledger.max_model_len, platform=self.platform.name)


def plan_engine(config: EngineConfig) -> EnginePlan:
    platform = get_platform(config.device.device)
    platform.start(config.device.num_threads)
    source = resolve_model(config.model.model, config.model.revision)
    _check_format(config.model.load_format, source)
    model_config = load_config(source)
    description = describe(model_config)
    settings = resolve(config, _defaults(platform, _dtype(config, platform)))
    dtype = getattr(torch, settings.dtype)
    backend = BACKENDS.get(settings.attention_backend)()
    demand = _demand(config, model_config, description, settings, dtype, backend, platform.name)
    supply = platform.available_memory()
    ledger = make_ledger(
        demand,
        supply,
        config.cache.kv_cache_memory,
        platform.default_kv_memory(supply - demand.fixed),
        config.model.max_model_len,
    )
    return EnginePlan(platform, source, model_config, description, settings, dtype, backend, ledger)


def plan_memory(config: EngineConfig) -> MemoryLedger:
    return plan_engine(config).ledger


def _check_format(load_format: str, source: ModelSource) -> None:
    formats = {"folder": "safetensors", "gguf": "gguf"}
    if load_format not in ("auto", "dummy", formats[source.kind]):
        kind = "a folder with safetensors" if source.kind == "folder" else "a .gguf file"
        raise ConfigError(
            f"load_format is {load_format!r} but {source.name!r} is {kind}; set --load-format auto or dummy"
        )


def _dtype(config: EngineConfig, platform: Platform) -> torch.dtype:
    given = config.model.dtype
    return platform.default_dtype if given == "auto" else getattr(torch, given)


def _defaults(platform: Platform, dtype: torch.dtype) -> DeviceDefaults:
    return DeviceDefaults(
        device=platform.name,
        dtype=str(platform.default_dtype).removeprefix("torch."),
        max_num_seqs=platform.default_max_num_seqs,
        max_num_batched_tokens=platform.default_max_num_batched_tokens,
        steps_in_flight=platform.default_steps_in_flight,
        attention_backend=_best_backend(platform, dtype),
    )


def _best_backend(platform: Platform, dtype: torch.dtype) -> str:
    """The first of the platform's backends that can serve; the last one always can."""
    *preferred, last = platform.attention_backends
    return next((name for name in preferred if BACKENDS.get(name).refuses(dtype) is None), last)


def kv_layout(description: ModelDescription, dtype: torch.dtype, block_size: int) -> KVLayout:
    layers = [
        LayerKV(
            kind="full" if layer.sliding_window is None else "sliding",
            window=layer.sliding_window,
            bytes_per_token=2 * layer.num_kv_heads * layer.head_dim * dtype.itemsize,
        )
        for layer in description.layers
    ]
    return plan_layout(layers, block_size)


def _demand(
    config: EngineConfig,
    model_config: dict[str, Any],
    description: ModelDescription,
    settings: ResolvedConfig,
    dtype: torch.dtype,
    backend: AttentionBackend,
    platform: str,
) -> MemoryDemand:
    length = config.model.max_model_len or description.max_position_embeddings
    with torch.device("meta"):
        model = model_class(model_config).from_config(
            model_config, BuildContext(dtype=dtype, max_model_len=length, platform=platform)
        )
    tensors = {id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}
    num_parameters = sum({id(p): p.numel() for p in model.parameters()}.values())
    spec = max(
        (layer.spec for layer in model.attention_layers()),
        key=lambda s: backend.workspace_bytes(s, length, dtype.itemsize),
    )
    return MemoryDemand(
        weights=sum(tensors.values()),
        weights_note=f"{num_parameters / 1e6:.1f} M parameters in {settings.dtype}",
        rows=settings.max_num_seqs * (length * 4 + length // config.cache.block_size * 4 + 64),
        workspace=_activations(model, description, settings, dtype)
        + backend.workspace_bytes(spec, length, dtype.itemsize),
        layout=kv_layout(description, dtype, config.cache.block_size),
        trained_len=description.max_position_embeddings,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
    )


def _activations(model: CausalLM, description: ModelDescription, settings: ResolvedConfig, dtype: torch.dtype) -> int:
    widest = max(layer.out_features for layer in model.modules() if isinstance(layer, Linear))
    widest = min(widest, 16 * description.hidden_size)  # an untied head is wide, but runs on sampled rows only
    tokens = settings.max_num_batched_tokens * (8 * description.hidden_size + 3 * widest) * dtype.itemsize
    # Logits, their log-softmax, the sampler's copy, and the words of the random generator.
    return tokens + settings.max_num_seqs * description.vocab_size * 4 * 8
