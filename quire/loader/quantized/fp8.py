"""Checkpoints of 8-bit floats: one scale for a matrix, for each output, or for each block of 128 x 128."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta

from quire.layers.scheme import Role, ScaleGrid, Scheme
from quire.loader.quantized.base import Leaves, QuantizedCheckpoint, scale_type

FP8_TYPES = {torch.float8_e4m3fn: "E4M3", torch.float8_e5m2: "E5M2"}
Side = Annotated[int, Meta(ge=1, le=1 << 24)]
_POWERS = torch.float8_e8m0fnu  # of two, as scales
_SCALES = ("weight_scale_inv", "weight_scale")
_INPUT_SCALES = ("input_scale", "activation_scale")


class _Settings(msgspec.Struct):
    activation_scheme: Literal["dynamic", "static"] = "dynamic"
    weight_block_size: tuple[Side, Side] | None = None


def fp8_scheme(leaves: Leaves, block: tuple[int, int] | None, scale_name: str, input_name: str | None) -> Scheme:
    """The scheme of an fp8 weight, whose scales' shape says what shares one; with `block`: that of its blocks."""
    weight, scale = leaves["weight"], leaves.get(scale_name)
    rows, columns = block or (None, None)
    if block is None and scale is not None and max(scale.shape, default=1) == weight.shape[0] > 1:
        rows = 1
    is_powers = scale is not None and scale.dtype == _POWERS
    roles: tuple[tuple[Role, str], ...] = (("weight", "weight"), ("scales", scale_name))
    if input_name is not None:
        roles = (*roles, ("input_scale", input_name))
    return Scheme(
        FP8_TYPES[weight.dtype],
        scales=ScaleGrid(rows, columns, _POWERS if is_powers else scale_type(scale, torch.float32)),
        activations="static" if input_name is not None else "per_group" if block is not None else "per_token",
        roles=roles,
    )


class Fp8(QuantizedCheckpoint):
    reads = "8-bit floats (E4M3), one scale per matrix, per output or per block; static and dynamic activations"
    ignored = ("*.q_scale", "*.input_scale_ub")
    scales_kv = True

    def configure(self) -> None:
        self._values = self.read_setting(_Settings)

    def scheme(self, path: str, leaves: Leaves) -> Scheme | None:
        if "weight" not in leaves or leaves["weight"].dtype not in FP8_TYPES:
            return None
        scale = next((name for name in _SCALES if name in leaves), _SCALES[0])
        static = self._values.activation_scheme == "static"
        input_scale = next((name for name in _INPUT_SCALES if name in leaves), _INPUT_SCALES[0] if static else None)
        block = self._values.weight_block_size if scale == _SCALES[0] else None
        return fp8_scheme(leaves, block, scale, input_scale)
