"""Checkpoints of ModelOpt: fp8 with one scale per matrix or block, and NVFP4."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Literal

import msgspec
import torch

from quire.layers.scheme import Packing, Role, ScaleGrid, Scheme
from quire.loader.quantized.base import Leaves, QuantizedCheckpoint
from quire.loader.quantized.fp8 import FP8_TYPES, Side, fp8_scheme

Algorithm = Literal[
    "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "MIXED_PRECISION"
]
_NIBBLES = Packing(torch.uint8, (0, 1))


class _Layer(msgspec.Struct):
    quant_algo: Algorithm | None = None
    group_size: Side | None = None


class _Settings(_Layer):
    quantized_layers: dict[str, _Layer] | None = None


class ModelOpt(QuantizedCheckpoint):
    reads = "FP8, FP8 in blocks and NVFP4, mixed per layer; its config in config.json or hf_quant_config.json"
    ignored = ("*.q_scale", "*.kv_b_proj.output_scale")
    scales_kv = True

    def configure(self) -> None:
        self._values = self.read_setting(_Settings)

    def scheme(self, path: str, leaves: Leaves) -> Scheme | None:
        if "weight_scale" not in leaves:
            return None
        input_name = "input_scale" if "input_scale" in leaves else None
        if leaves["weight"].dtype in FP8_TYPES if "weight" in leaves else False:
            in_blocks = (
                self._layer_at(path).quant_algo == "FP8_PB_WO" or len(_wide(leaves["weight_scale"].shape)) == 2
            )
            return fp8_scheme(leaves, (128, 128) if in_blocks else None, "weight_scale", input_name)
        roles: tuple[tuple[Role, str], ...] = (
            *(("weight", "weight"), ("scales", "weight_scale"), ("second_scale", "weight_scale_2")),
        )
        return Scheme(
            "E2M1",
            packing=_NIBBLES,
            scales=ScaleGrid(
                1, self._layer_at(path).group_size or self._values.group_size or 16, torch.float8_e4m3fn
            ),
            second_scale="multiplies",
            activations="none" if input_name is None else "per_group",
            roles=roles if input_name is None else (*roles, ("input_scale", input_name)),
        )

    def _layer_at(self, path: str) -> _Layer:
        layers = (self._values.quantized_layers or {}).items()
        return next((layer for pattern, layer in layers if fnmatchcase(path, pattern)), self._values)


def _wide(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(side for side in shape if side > 1)
