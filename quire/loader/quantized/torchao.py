"""Checkpoints of torchao in safetensors: bytes (integers or fp8) with a scale for each row, group or block."""

from __future__ import annotations

import torch

from quire.layers.scheme import ActivationRule, Role, ScaleGrid, Scheme, ZeroPoints
from quire.loader.quantized.base import Leaves, QuantizedCheckpoint
from quire.types.errors import CheckpointError

_ELEMENTS = {torch.int8: "INT8", torch.float8_e4m3fn: "E4M3", torch.float8_e5m2: "E5M2"}
# How a model was quantized -> how activations are to be.
CONFIGS: dict[str, ActivationRule] = {
    "Int8WeightOnlyConfig": "none",
    "Int8DynamicActivationInt8WeightConfig": "per_token",
    "IntxWeightOnlyConfig": "none",
    "Int8DynamicActivationIntxWeightConfig": "per_token",
    "Float8WeightOnlyConfig": "none",
    "Float8DynamicActivationFloat8WeightConfig": "per_token",
}


class TorchAo(QuantizedCheckpoint):
    reads = "int8, fp8, and integers of fewer bits that are kept in bytes, with dynamic activations or without"

    def configure(self) -> None:
        kind = self.settings.get("quant_type")
        named = kind.get("default") if isinstance(kind, dict) else None
        name = named.get("_type") if isinstance(named, dict) else kind
        if not isinstance(name, str) or name not in CONFIGS:
            raise CheckpointError(
                f"the model config's quantization_config.quant_type is {name!r}, which cannot be read; known:"
                f" {', '.join(CONFIGS)}; quantize the model with one of these"
            )
        self._rule = CONFIGS[name]

    def scheme(self, path: str, leaves: Leaves) -> Scheme | None:
        weight, scale = leaves.get("_weight_qdata"), leaves.get("_weight_scale")
        if weight is None:
            return None
        if weight.dtype not in _ELEMENTS or len(weight.shape) != 2:
            raise CheckpointError(
                f"{path}._weight_qdata is of {weight.dtype} and shape {list(weight.shape)}, which cannot be read;"
                f" quantize the model with one of {', '.join(CONFIGS)}"
            )
        roles: tuple[tuple[Role, str], ...] = (("weight", "_weight_qdata"), ("scales", "_weight_scale"))
        zeros = "_weight_zero_point" in leaves
        return Scheme(
            _ELEMENTS[weight.dtype],
            scales=ScaleGrid(None, None, torch.float32)
            if scale is None
            else _grid(weight.shape, scale.shape, scale.dtype),
            zeros=ZeroPoints() if zeros else None,
            activations=self._rule,
            roles=(*roles, ("zeros", "_weight_zero_point")) if zeros else roles,
        )


def _grid(shape: tuple[int, ...], scales: tuple[int, ...], dtype: torch.dtype) -> ScaleGrid:
    """What shares a scale, by how many there are along each side."""
    sides = [
        None if count == 1 else max(size // max(count, 1), 1) for size, count in zip(shape, scales, strict=False)
    ]
    rows, columns = sides if len(sides) == 2 else (None, None)
    return ScaleGrid(rows, columns, dtype)
