"""A quantized checkpoint of a test: 4-bit integers in 32-bit words, a scale for each 16 columns."""

from __future__ import annotations

import torch

from quire.layers.scheme import Packing, ScaleGrid, Scheme, ZeroPoints
from quire.loader.quantized.base import Leaves, QuantizedCheckpoint

GROUP = 16
INT4_GROUPS = Scheme(
    "UINT4",
    packing=Packing(torch.int32, tuple(range(8))),
    scales=ScaleGrid(1, GROUP, torch.float32),
    zeros=ZeroPoints(implied=8.0),
    roles=(("weight", "weight_packed"), ("scales", "weight_scale"), ("shape", "weight_shape")),
)


class Int4Groups(QuantizedCheckpoint):
    ignored = ("*.weight_observer",)

    def scheme(self, path: str, leaves: Leaves) -> Scheme | None:
        return INT4_GROUPS if "weight_packed" in leaves else None
