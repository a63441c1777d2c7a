"""Before anything is loaded: find the model, resolve the settings, and write the memory ledger.

This is all that `quire fit` runs; the worker runs the same and then takes what the ledger says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from quire.attention.base import AttentionBackend
from quire.attention.registry import BACKENDS
from quire.config.engine import EngineConfig
from quire.config.resolve import DeviceDefaults, ResolvedConfig, resolve
from quire.kv.layout import KVLayout, LayerKV, plan_layout
from quire.layers.linear import Linear
from quire.layers.quant.registry import choose_quantization
from quire.layers.scheme import F32, Scheme, float_scheme
from quire.loader.checkpoint import Checkpoint
from quire.loader.hub import ModelSource, find_model
from quire.loader.mapper import count_parameters, planned_bytes
from quire.loader.model_config import load_config
from quire.loader.open import has_weights, open_checkpoint
from quire.models.base import BuildContext, CausalLM, ModelDescription
from quire.models.experts import ExpertsMLP
from quire.models.registry import describe, generator_class
from quire.ops.base import Target
from quire.platform.base import MemorySupply, Platform
from quire.platform.registry import get_platform
from quire.runner.cuda_graphs import CaptureSizes, capture_sizes
from quire.runner.sampling.mask_buffer import mask_words
from quire.types.errors import ConfigError
from quire.worker.ledger import MemoryDemand, MemoryLedger, check_trained, make_ledger


class GraphBytes(NamedTuple):
    """Memory of captured steps: of forward passes, and of what samples."""

    forward: int = 0
    sample: int = 0


NO_GRAPHS = GraphBytes()


@dataclass(frozen=True)
class EnginePlan:
    """Everything decided before a byte of weights is read."""

    platform: Platform
    source: ModelSource
    model_config: dict[str, Any]
    description: ModelDescription
    settings: ResolvedConfig
    dtype: torch.dtype
    kv_dtype: torch.dtype
    backend: AttentionBackend
    demand: MemoryDemand
    ledger: MemoryLedger
    checkpoint: Checkpoint | None  # None: weights are made up
    graphs: GraphBytes = NO_GRAPHS

    @property
    def context(self) -> BuildContext:
        return _build_context(self.settings, self.platform, self.ledger.max_model_len, self.deterministic)

    @property
    def deterministic(self) -> bool:
        return self.backend.name == self.platform.deterministic_backend

    def without_checkpoint(self) -> EnginePlan:
        """The same for a model that is loaded, which needs the file and its metadata no more."""
        return replace(self, checkpoint=None)


def plan_engine(config: EngineConfig, *, needs_weights: bool = True) -> EnginePlan:
    """Without `needs_weights` a folder with a config alone will do, its weights counting in the type it names."""
    platform = get_platform(config.device.device)
    platform.start(config.device.num_threads)
    source = find_model(config.model)
    made_up = config.model.load_format == "dummy"
    reads = not made_up and (needs_weights or has_weights(source))
    checkpoint = open_checkpoint(source) if reads else None
    model_config = load_config(source) if checkpoint is None else checkpoint.config
    description = describe(model_config)
    tensors = checkpoint.tensors().values() if checkpoint is not None and source.kind == "gguf" else ()
    default_dtype = _default_dtype(
        config, platform, generator_class(model_config), {info.scheme.element for info in tensors}
    )
    settings = resolve(config, _defaults(config, platform, default_dtype))
    dtype = getattr(torch, settings.dtype)
    backend = BACKENDS.get(settings.attention_backend)()
    backend.start()
    _check_heads(description, backend)
    kv_dtype = _kv_dtype(config, backend, dtype)
    length = config.model.max_model_len or description.max_position_embeddings
    check_trained(length, description.max_position_embeddings)  # before tables of that length are made
    with torch.device("meta"):
        model = generator_class(model_config).from_config(
            model_config, _build_context(settings, platform, length, backend.name == platform.deterministic_backend)
        )
    if checkpoint is not None:
        weights = planned_bytes(model, checkpoint.tensors())
    else:
        weights = planned_bytes(model, None, F32 if made_up else _named_scheme(model_config))
    demand = _demand(config, platform, model, weights, description, settings, kv_dtype, backend, length)
    supply = platform.available_memory(config.cache.gpu_memory_utilization)
    ledger = _ledger(config, platform, demand, supply)
    return EnginePlan(
        platform, source, model_config, description, settings, dtype, kv_dtype, backend, demand, ledger, checkpoint
    )


def with_workspace(plan: EnginePlan, config: EngineConfig, workspace: int, graphs: GraphBytes) -> EnginePlan:
    """The same plan, its KV blocks sized by what was measured instead of the estimate."""
    demand = replace(plan.demand, workspace=workspace + sum(graphs))
    ledger = _ledger(config, plan.platform, demand, plan.ledger.supply)
    return replace(plan, demand=demand, ledger=ledger, graphs=graphs)


def _ledger(config: EngineConfig, platform: Platform, demand: MemoryDemand, supply: MemorySupply) -> MemoryLedger:
    one_request = demand.kv_bytes(config.model.max_model_len or demand.trained_len)
    return make_ledger(
        demand,
        supply,
        config.cache.kv_cache_memory,
        platform.default_kv_memory(supply.num_bytes - demand.fixed, one_request),
        config.model.max_model_len,
    )


def plan_memory(config: EngineConfig) -> MemoryLedger:
    return plan_engine(config, needs_weights=False).ledger


def _named_scheme(model_config: Mapping[str, Any]) -> Scheme:
    """What a config says of its weights."""
    named = str(model_config.get("dtype") or model_config.get("torch_dtype"))
    return float_scheme({"bfloat16": torch.bfloat16, "float16": torch.float16}.get(named, torch.float32))


def _check_heads(description: ModelDescription, backend: AttentionBackend) -> None:
    widest, limit = max(layer.head_dim for layer in description.layers), backend.max_head_dim
    if limit is not None and widest > limit:
        raise ConfigError(
            f"head_dim is {widest} but {backend.name} attention takes at most {limit}; set --device cpu"
        )


def _default_dtype(
    config: EngineConfig, platform: Platform, model: type[CausalLM], gguf_formats: set[str]
) -> tuple[torch.dtype, str]:
    """The type of activations that is taken unless the user says, and why; formats are of a GGUF file's tensors.

    Scales of quantized blocks are float16: bfloat16 would round away three bits of each weight that comes of them,
    and of activations. See benchmarks/precision.py.
    """
    usual = platform.default_dtype, f"default on {platform.name}"
    plain = config.model.quantization in ("auto", "none")  # fp8's kernels are made for bfloat16
    if usual[0] != torch.bfloat16 or not gguf_formats or "BF16" in gguf_formats:
        return usual
    if not plain or not model.fits_float16:
        return usual
    return torch.float16, f"{usual[1]} for a GGUF file of a {model.__name__}, whose activations it holds"


def _defaults(config: EngineConfig, platform: Platform, dtype: tuple[torch.dtype, str]) -> DeviceDefaults:
    default, reason = dtype
    given = config.model.dtype
    target = Target(platform.name, default)
    method = choose_quantization(target)
    return DeviceDefaults(
        device=platform.name,
        dtype=str(default).removeprefix("torch."),
        dtype_reason=reason,
        quantization=method.name,
        activations=method.activations(target),
        max_num_seqs=platform.default_max_num_seqs,
        max_num_batched_tokens=platform.default_max_num_batched_tokens,
        steps_in_flight=platform.default_steps_in_flight,
        attention_backend=_best_backend(platform, default if given == "auto" else getattr(torch, given)),
        deterministic_backend=platform.deterministic_backend,
        step_time_target=platform.default_step_time_target,
    )


def _kv_dtype(config: EngineConfig, backend: AttentionBackend, dtype: torch.dtype) -> torch.dtype:
    possible = {str(kv).removeprefix("torch."): kv for kv in backend.kv_dtypes(dtype)}
    name = config.cache.kv_cache_dtype
    if name == "auto":
        return backend.kv_dtypes(dtype)[0]
    wanted = possible.get("float8_e4m3fn" if name == "fp8" else name)
    if wanted is None:
        raise ConfigError(
            f"kv_cache_dtype is {name!r} but {backend.name} attention keeps keys and values as {', '.join(possible)};"
            " set --kv-cache-dtype auto"
        )
    return wanted


def _best_backend(platform: Platform, dtype: torch.dtype) -> str:
    """The first of the platform's backends that can serve; the last one always can."""
    *preferred, last = platform.attention_backends
    return next((name for name in preferred if BACKENDS.get(name).refuses(dtype) is None), last)


def kv_layout(
    description: ModelDescription, backend: AttentionBackend, dtype: torch.dtype, block_size: int
) -> KVLayout:
    def block_bytes(num_kv_heads: int, head_dim: int) -> int:
        return math.prod(backend.cache_shape(1, block_size, num_kv_heads, head_dim, dtype)) * dtype.itemsize

    layers = [
        LayerKV(
            kind="full" if layer.sliding_window is None else "sliding",
            window=layer.sliding_window,
            bytes_per_token=block_bytes(layer.num_kv_heads, layer.head_dim) // block_size,
        )
        for layer in description.layers
    ]
    return plan_layout(layers, block_size)


def _build_context(
    settings: ResolvedConfig, platform: Platform, max_model_len: int, deterministic: bool
) -> BuildContext:
    return BuildContext(
        dtype=getattr(torch, settings.dtype),
        max_model_len=max_model_len,
        platform=platform.name,
        quantization=settings.quantization,
        deterministic=deterministic,
        activations=settings.activations,
    )


def _demand(
    config: EngineConfig,
    platform: Platform,
    model: CausalLM,
    weights: int,
    description: ModelDescription,
    settings: ResolvedConfig,
    kv_dtype: torch.dtype,
    backend: AttentionBackend,
    length: int,
) -> MemoryDemand:
    dtype: torch.dtype = getattr(torch, settings.dtype)
    num_parameters = count_parameters(model)
    attention = max(backend.workspace_bytes(layer.spec, length, dtype.itemsize) for layer in model.attention_layers())
    token = _token_bytes(model, description, dtype)
    mlps = (layer for layer in model.modules() if isinstance(layer, ExpertsMLP))
    experts = max((mlp.workspace_bytes(settings.max_num_batched_tokens) for mlp in mlps), default=0)
    beside, graphs = beside_steps(platform, backend, settings, description, model, token, length)
    return MemoryDemand(
        weights=weights + sum(buffer.nbytes for buffer in model.buffers()),
        weights_note=f"{num_parameters / 1e6:.1f} M parameters of {8 * weights / num_parameters:.1f} bits",
        rows=settings.max_num_seqs
        * (length * 4 + length // config.cache.block_size * 4 + mask_words(description.vocab_size) * 4 + 64),
        workspace=settings.max_num_batched_tokens * token + attention + experts + beside + sum(graphs),
        layout=kv_layout(description, backend, kv_dtype, config.cache.block_size),
        trained_len=description.max_position_embeddings,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        reserved=config.device.reserved_memory if platform.uses_host_memory else 0,
    )


def _token_bytes(model: CausalLM, description: ModelDescription, dtype: torch.dtype) -> int:
    """What a step takes for each of its tokens."""
    widest = max(layer.out_features for layer in model.modules() if isinstance(layer, Linear))
    widest = min(widest, 16 * description.hidden_size)  # an untied head is wide, but runs on sampled rows only
    return (8 * description.hidden_size + 3 * widest) * dtype.itemsize


def sampling_bytes(description: ModelDescription, settings: ResolvedConfig) -> int:
    """Logits, the sampler's copies, the words of the random generator, and keys by which the likeliest are found."""
    return settings.max_num_seqs * description.vocab_size * 4 * 8


def graph_sizes(
    platform: Platform, backend: AttentionBackend, settings: ResolvedConfig, model: CausalLM
) -> CaptureSizes | None:
    """What steps are captured for; None where none are."""
    if not platform.graph_sizes or not backend.records:
        return None
    sizes = (platform.graph_sizes, platform.mixed_graph_sizes)
    return capture_sizes(model, *sizes, settings.max_num_seqs, settings.max_num_batched_tokens)


def beside_steps(
    platform: Platform,
    backend: AttentionBackend,
    settings: ResolvedConfig,
    description: ModelDescription,
    model: CausalLM,
    bytes_per_token: float,
    max_model_len: int,
) -> tuple[int, GraphBytes]:
    """What is taken beside a step of prompts, and what the largest captured steps take, with an eighth for gaps."""
    specs = [layer.spec for layer in model.attention_layers()]
    parts = max(backend.parts_bytes(spec, settings.max_num_seqs, max_model_len) for spec in specs)
    beside = parts + sampling_bytes(description, settings)
    sizes = graph_sizes(platform, backend, settings, model)
    if sizes is None:
        return beside, NO_GRAPHS
    forward = int(1.125 * (sizes.max_tokens * bytes_per_token + parts))
    return beside, GraphBytes(forward, captured_sampling_bytes(description, settings))


def captured_sampling_bytes(description: ModelDescription, settings: ResolvedConfig) -> int:
    """What captured steps add where sampling is a part of them, and keep.

    Logits, a copy that is shaped, counts for penalties, what draws and log-probabilities know
    of parts of the vocabulary, tables of each row.
    """
    tables = mask_words(description.vocab_size) * 4 + (1 << 15)
    return settings.max_num_seqs * (description.vocab_size * (4 + 4 + 4) + description.vocab_size // 8 + tables)
