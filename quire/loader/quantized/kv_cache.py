"""What a checkpoint says of a KV cache in fp8: whether it is made for one, and the scales of each layer."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quire.layers.attention import AttentionLayer
from quire.loader.checkpoint import Checkpoint
from quire.types.errors import CheckpointError

logger = logging.getLogger(__name__)
FP8 = torch.float8_e4m3fn
# One number for the keys or the values of a layer, or for both.
_NAME = re.compile(
    r"(?:model\.|language_model\.|transformer\.)*layers\.(\d+)\.\w*attn\w*\.(?:attn\.|\w+_proj\.)?(k|v|kv)_scale"
)


def asked_kv_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """The type of KV cache that a model's config names: fp8 with one scale for a layer, or none."""
    settings = config.get("quantization_config") or {}
    scheme = settings.get("kv_cache_scheme")
    if not isinstance(scheme, dict):
        return FP8 if settings.get("kv_cache_quant_algo") == "FP8" else None
    kind = (
        scheme.get("num_bits"),
        scheme.get("type"),
        scheme.get("strategy") or "tensor",
        bool(scheme.get("dynamic")),
    )
    return FP8 if kind == (8, "float", "tensor", False) else None


def scale_caches(layers: Iterable[AttentionLayer], checkpoint: Checkpoint, kv_dtype: torch.dtype) -> None:
    """Give layers that keep fp8 the scales that the checkpoint has for them; the log says what becomes of these."""
    scales = checkpoint.kv_scales()
    if not scales:
        return
    name = str(kv_dtype).removeprefix("torch.")
    if kv_dtype != FP8:
        logger.info(
            "%d scales of the checkpoint are for a KV cache in fp8, and it is %s; --kv-cache-dtype fp8 uses them",
            *(len(scales), name),
        )
        return
    kept = {layer.layer_index: layer for layer in layers}
    latents = {index for index, layer in kept.items() if layer.spec.value_dim is not None}
    of_layers, used = _by_layer(scales, latents), 0
    for index, layer in kept.items():
        if (found := of_layers.get(index)) is not None:
            # Backends see latents that are divided already (LatentBlock), whose scores are too small by as much.
            scale = layer.spec.scale * (found[0] if index in latents else 1.0)
            layer.spec = replace(layer.spec, kv_scales=found, scale=scale)
            used += 1
    logger.info("keys and values of %d layers are kept as fp8 with the scales of the checkpoint", used)


def _by_layer(scales: Mapping[str, Tensor], latents: Collection[int]) -> dict[int, tuple[float, float]]:
    """The scales of keys and values by the index of their layer; those of other parts of a model are left out.

    A latent is key and value at once, and has the scale of keys.
    """
    keys: dict[int, float] = {}
    values: dict[int, float] = {}
    for name, tensor in scales.items():
        # What ModelOpt calls the output of a projection is the key or the value.
        usual = name.replace(".k_proj.output_scale", ".k_scale").replace(".v_proj.output_scale", ".v_scale")
        match = _NAME.fullmatch(usual)
        if match is None:
            continue
        number = _number(name, tensor)
        for part, found in (("k", keys), ("v", values)):
            if part in match[2]:
                found[int(match[1])] = number
    values |= {layer: scale for layer, scale in keys.items() if layer in latents}
    for layer in keys.keys() ^ values.keys():
        has, lacks = ("keys", "values") if layer in keys else ("values", "keys")
        raise CheckpointError(
            f"the checkpoint has a scale for the {has} of layer {layer} in an fp8 KV cache, and none for its {lacks};"
            " is it complete? set --kv-cache-dtype to another type"
        )
    return {layer: (keys[layer], values[layer]) for layer in keys}


def _number(name: str, tensor: Tensor) -> float:
    if tensor.numel() != 1:
        raise CheckpointError(
            f"{name} has the shape {list(tensor.shape)}, but an fp8 KV cache has one scale for a layer; set"
            " --kv-cache-dtype to another type"
        )
    number = float(tensor)
    if not (number > 0 and math.isfinite(number)):
        raise CheckpointError(
            f"{name} is {number}, but a scale of an fp8 KV cache is above 0; set --kv-cache-dtype to another type"
        )
    return number
