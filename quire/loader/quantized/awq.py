"""Checkpoints of AWQ: 4-bit integers in 32-bit words along the outputs, even ones before odd ones."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta

from quire.layers.scheme import Packing, ScaleGrid, Scheme, ZeroPoints
from quire.loader.quantized.base import Leaves, QuantizedCheckpoint, scale_type

# Outputs 0, 2, 4, 6 lie below 1, 3, 5, 7 in a word.
_INTERLEAVED = Packing(torch.int32, (0, 4, 1, 5, 2, 6, 3, 7), axis=0)


class _Settings(msgspec.Struct):
    bits: Literal[4] = 4
    group_size: Annotated[int, Meta(ge=-1)] = 128  # -1: all inputs
    version: Literal["gemm", "GEMM"] = "gemm"
    zero_point: bool = True


class Awq(QuantizedCheckpoint):
    reads = "4 bits with zero points, in groups (the gemm layout)"

    def configure(self) -> None:
        values = {"bits": self.settings.get("w_bit", 4), "group_size": self.settings.get("q_group_size", 128)}
        self._values = self.read_setting(_Settings, {**values, **self.settings})

    def scheme(self, path: str, leaves: Leaves) -> Scheme | None:
        if "qweight" not in leaves:
            return None
        group = self._values.group_size
        stored = self._values.zero_point
        return Scheme(
            "UINT4",
            packing=_INTERLEAVED,
            scales=ScaleGrid(1, group if group > 0 else None, scale_type(leaves.get("scales"), torch.float16)),
            zeros=ZeroPoints(packing=_INTERLEAVED) if stored else ZeroPoints(implied=8.0),
            roles=(("weight", "qweight"), ("scales", "scales"), *((("zeros", "qzeros"),) if stored else ())),
            transposed=True,
        )
