"""Settings that follow from the device, the checkpoint and the attention backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from quire.attention.forms import AttentionBackends
from quire.attention.registry import BACKENDS
from quire.config.engine import EngineConfig
from quire.config.resolve import DeviceDefaults, ResolvedConfig
from quire.layers.quant.registry import choose_quantization
from quire.loader.checkpoint import Checkpoint
from quire.models.base import Model
from quire.ops.base import Target
from quire.platform.base import Platform
from quire.types.errors import ConfigError


def find_default_dtype(
    config: EngineConfig, platform: Platform, model: type[Model], gguf_formats: set[str]
) -> tuple[torch.dtype, str]:
    """The type of activations that is taken unless the user says, and why; formats are of a GGUF file's tensors.

    Scales of quantized blocks are float16: bfloat16 would round away three bits of each weight that comes of them,
    and of activations. See benchmarks/precision.py.
    """
    usual = platform.default_dtype, f"default on {platform.name}"
    plain = config.model.quantization in ("auto", "none", "stored")  # fp8's kernels are made for bfloat16
    if usual[0] != torch.bfloat16 or not gguf_formats or "BF16" in gguf_formats:
        return usual
    if not plain or not model.fits_float16:
        return usual
    return torch.float16, f"{usual[1]} for a GGUF file of a {model.__name__}, whose activations it holds"


def stored_elements(checkpoint: Checkpoint | None, kind: str, model_config: Mapping[str, Any]) -> list[str]:
    """What quantized matrices of a checkpoint are stored as; none of a GGUF file's, which are small if asked for."""
    if kind == "gguf":
        return []
    if checkpoint is None:
        return (
            [str(method)] if (method := (model_config.get("quantization_config") or {}).get("quant_method")) else []
        )
    return sorted({info.scheme.element for info in checkpoint.tensors().values() if not info.scheme.is_float})


def _multiplies_bytes(checkpoint: Checkpoint | None) -> bool:
    """Whether a checkpoint is made for activations of 8-bit integers: all of its quantized weights (W8A8)."""
    infos = () if checkpoint is None else checkpoint.tensors().values()
    schemes = [info.scheme for info in infos if not info.scheme.is_float]
    return bool(schemes) and all(scheme.element == "INT8" and scheme.activations != "none" for scheme in schemes)


def device_defaults(
    config: EngineConfig,
    platform: Platform,
    dtype: tuple[torch.dtype, str],
    stored_as: Sequence[str],
    checkpoint: Checkpoint | None,
) -> DeviceDefaults:
    default, reason = dtype
    given = config.model.dtype
    target = Target(platform.name, default)
    method, has_bytes = choose_quantization(target), _multiplies_bytes(checkpoint)
    if method.any_dtype and not stored_as:
        method = choose_quantization(replace(target, quantization="none"))
    return DeviceDefaults(
        device=platform.name,
        dtype=str(default).removeprefix("torch."),
        dtype_reason=reason,
        quantization=method.name,
        quantization_reason=f"{', '.join(stored_as)} in the checkpoint" if method.any_dtype else "",
        typed_quantization=method.name if method.any_dtype else "none",
        activations="int8" if has_bytes and method.rounds_activations else method.activations(target),
        activations_reason="what the checkpoint is made for" if has_bytes else "",
        max_num_seqs=platform.default_max_num_seqs,
        max_num_batched_tokens=platform.default_max_num_batched_tokens,
        steps_in_flight=platform.default_steps_in_flight,
        attention_backend=_best_backend(platform, default if given == "auto" else getattr(torch, given)),
        deterministic_backend=platform.deterministic_backend,
        step_time_target=platform.default_step_time_target,
    )


def _best_backend(platform: Platform, dtype: torch.dtype) -> str:
    """The first of the platform's backends that can serve; the last one always can."""
    *preferred, last = platform.attention_backends
    return next((name for name in preferred if BACKENDS.get(name).refuses(dtype) is None), last)


def with_whole_prompts(settings: ResolvedConfig, given: int | None, length: int) -> ResolvedConfig:
    """Settings under which a prompt of `length` tokens is computed in one step, as bidirectional attention needs."""
    if settings.max_num_batched_tokens >= length:
        return settings
    if given is not None:
        raise ConfigError(
            f"max_num_batched_tokens is {given}, but this model attends in both directions, so that a prompt of"
            f" max_model_len ({length}) tokens must fit into one step; raise it, or set --max-model-len {given}"
        )
    reasons = {**settings.reasons, "max_num_batched_tokens": "the longest prompt: attention is bidirectional"}
    return replace(settings, max_num_batched_tokens=length, reasons=reasons)


def choose_kv_dtype(
    config: EngineConfig, backends: AttentionBackends, dtype: torch.dtype, pools: bool, asked: torch.dtype | None
) -> torch.dtype:
    possible = {str(kv).removeprefix("torch."): kv for kv in backends.kv_dtypes(dtype)}
    name = config.cache.kv_cache_dtype
    if name == "auto" and pools and dtype in possible.values():
        return dtype  # keys and values live for a few steps: there is no memory to be saved
    if name == "auto":
        return next((kv for kv in possible.values() if kv == asked), backends.kv_dtypes(dtype)[0])
    wanted = possible.get("float8_e4m3fn" if name == "fp8" else name)
    if wanted is None:
        raise ConfigError(
            f"kv_cache_dtype is {name!r} but {backends.name} attention keeps keys and values as"
            f" {', '.join(possible)}; set --kv-cache-dtype auto"
        )
    return wanted
