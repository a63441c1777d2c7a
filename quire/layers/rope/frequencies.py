"""Inverse frequencies of each RoPE type. A function takes the parameters and the longest sequence that will be
served, and returns the frequencies [rotary_dim / 2] and the factor on cos and sin. Adding a type is a function of the
same shape and one line of ROPE_TYPES.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from quire.layers.rope.parameters import RopeParameters
from quire.types.errors import ModelError
from quire.utils.registry import Registry

Frequencies = tuple[Tensor, float]


def default(rope: RopeParameters, max_model_len: int) -> Frequencies:
    return 1.0 / _wavelengths(rope, rope.theta), 1.0


def linear(rope: RopeParameters, max_model_len: int) -> Frequencies:
    return default(rope, max_model_len)[0] / rope.required("factor"), 1.0


def dynamic(rope: RopeParameters, max_model_len: int) -> Frequencies:
    """NTK scaling: the base grows with the longest sequence, beyond the length of training."""
    factor = rope.required("factor")
    stretch = max(max_model_len, rope.max_position_embeddings) / rope.max_position_embeddings
    exponent = rope.rotary_dim / (rope.rotary_dim - 2)
    theta = rope.theta * (factor * stretch - (factor - 1)) ** exponent
    return 1.0 / _wavelengths(rope, theta), 1.0


def ntk(rope: RopeParameters, max_model_len: int) -> Frequencies:
    """Fixed NTK scaling (GTE): of a larger base, or with `mixed_b` by a factor that grows with the frequency's index.

    https://kexue.fm/archives/9706, equations 6 and 10 to 13.
    """
    factor, count = rope.required("factor"), rope.rotary_dim // 2
    if rope.mixed_b is None:
        return 1.0 / (_wavelengths(rope, rope.theta * factor) * factor ** (1 / count)), 1.0
    growth = math.log(factor) / count**rope.mixed_b * torch.arange(1, count + 1, dtype=torch.float32) ** rope.mixed_b
    return default(rope, max_model_len)[0] / growth.exp(), 1.0


def llama3(rope: RopeParameters, max_model_len: int) -> Frequencies:
    """Low frequencies are divided by the factor, high ones kept, those between are blended."""
    frequencies = default(rope, max_model_len)[0]
    factor, low, high = (rope.required(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = rope.required("original_max_position_embeddings") * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / factor + kept * frequencies, 1.0


def yarn(rope: RopeParameters, max_model_len: int) -> Frequencies:
    """Dimensions that turn often are kept, those that turn rarely are interpolated, with a ramp between."""
    original = rope.required("original_max_position_embeddings")
    factor = rope.factor or rope.max_position_embeddings / original
    low, high = (_dimension_of(rope, turns, original) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    frequencies = default(rope, max_model_len)[0]
    return ramp * frequencies / factor + (1 - ramp) * frequencies, _yarn_attention_factor(rope, factor)


def longrope(rope: RopeParameters, max_model_len: int) -> Frequencies:
    """One factor per frequency, from the long list when longer sequences than the original will be served."""
    original = rope.required("original_max_position_embeddings")
    name = "long_factor" if max_model_len > original else "short_factor"
    factors = rope.required(name)
    if len(factors) != rope.rotary_dim // 2:
        raise ModelError(f"{name} has {len(factors)} values; rotary dimension {rope.rotary_dim} needs half as many")
    scale = rope.factor or rope.max_position_embeddings / original
    attention_factor = rope.attention_factor
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1.0 else 1.0
    return 1.0 / (torch.tensor(factors) * _wavelengths(rope, rope.theta)), attention_factor


def _wavelengths(rope: RopeParameters, theta: float) -> Tensor:
    """Per frequency, in positions per radian."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    wavelengths: Tensor = theta**exponents
    return wavelengths


def _dimension_of(rope: RopeParameters, turns: float, length: int) -> float:
    """The (fractional) frequency index that makes `turns` full turns within `length` positions."""
    return rope.rotary_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_attention_factor(rope: RopeParameters, factor: float) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_magnitude(factor, rope.mscale) / yarn_magnitude(factor, rope.mscale_all_dim)
    return yarn_magnitude(factor, 1.0)


def yarn_magnitude(factor: float, weight: float) -> float:
    """What scores of a context that is `factor` times as long are scaled by, as the root."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


ROPE_TYPES: Registry[Callable[[RopeParameters, int], Frequencies]] = Registry(
    "rope type",
    "quire.layers.rope",
    {
        "default": "frequencies:default",
        "linear": "frequencies:linear",
        "dynamic": "frequencies:dynamic",
        "ntk": "frequencies:ntk",
        "llama3": "frequencies:llama3",
        "yarn": "frequencies:yarn",
        "longrope": "frequencies:longrope",
    },
)
