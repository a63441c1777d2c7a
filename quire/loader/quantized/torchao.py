"""Checkpoints of torchao in safetensors: bytes (integers or fp8) with a scale for each row, group or block, and
packed integers of 4 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.layers.scheme import ActivationRule, Packing, Role, ScaleGrid, Scheme, ZeroPoints
from quire.loader.quantized.base import Leaves, QuantizedCheckpoint, scale_type
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
    "Int4WeightOnlyConfig": "none",
    "Float8DynamicActivationInt4WeightConfig": "per_token",
}
_PACKED = ("Int4WeightOnlyConfig", "Float8DynamicActivationInt4WeightConfig")  # in plain order
_INT4_ROLES: tuple[tuple[Role, str], ...] = (
    *(("weight", "_weight_qdata"), ("scales", "_weight_scale"), ("minima", "_weight_zero_point")),
)


class TorchAo(QuantizedCheckpoint):
    reads = "int8, fp8, fewer bits that are kept in bytes, packed int4; dynamic activations or none"

    def configure(self) -> None:
        kind = self.settings.get("quant_type")
        named = kind.get("default") if isinstance(kind, dict) else None
        name = named.get("_type") if isinstance(named, dict) else kind
        if not isinstance(name, str) or name not in CONFIGS:
            raise CheckpointError(
                f"the model config's quantization_config.quant_type is {name!r}, which cannot be read; known:"
                f" {', '.join(CONFIGS)}; quantize the model with one of these"
            )
        self._rule, self._is_packed = CONFIGS[name], name in _PACKED
        if self._is_packed and isinstance(named, dict):
            _check_packing(named)

    def scheme(self, path: str, leaves: Leaves) -> Scheme | None:
        weight, scale = leaves.get("_weight_qdata"), leaves.get("_weight_scale")
        if weight is None:
            return None
        if weight.dtype not in _ELEMENTS or len(weight.shape) != 2:
            raise CheckpointError(
                f"{path}._weight_qdata is of {weight.dtype} and shape {list(weight.shape)}, which cannot be read;"
                f" quantize the model with one of {', '.join(CONFIGS)}"
            )
        if self._is_packed:
            groups = 1 if scale is None or not scale.shape else scale.shape[0]
            grid = ScaleGrid(1, max(2 * weight.shape[1] // max(groups, 1), 1), scale_type(scale, torch.bfloat16))
            packing = Packing(torch.uint8, (0, 1))
            return Scheme("UINT4", packing=packing, scales=grid, activations=self._rule, roles=_INT4_ROLES)
        roles: tuple[tuple[Role, str], ...] = (("weight", "_weight_qdata"), ("scales", "_weight_scale"))
        zeros = "_weight_zero_point" in leaves
        return Scheme(
            _ELEMENTS[weight.dtype],
            scales=ScaleGrid(None, None, torch.float32)
            if scale is None
            else _grid(weight.shape, scale.shape, scale_type(scale, torch.float32)),
            zeros=ZeroPoints() if zeros else None,
            activations=self._rule,
            roles=(*roles, ("zeros", "_weight_zero_point")) if zeros else roles,
        )

    def role_shape(self, scheme: Scheme, role: Role, shape: tuple[int, ...]) -> tuple[int, ...]:
        stored = super().role_shape(scheme, role, shape)
        return stored[::-1] if self._is_packed and role in ("scales", "minima") else stored

    def dtypes(self, scheme: Scheme, role: Role) -> tuple[torch.dtype, ...]:
        return (torch.int8, torch.uint8) if self._is_packed and role == "weight" else super().dtypes(scheme, role)

    def present(self, path: str, tensors: dict[Role, Tensor]) -> None:
        """Codes are signed, and the value of code 0, not of the lowest one, is stored beside each scale."""
        if not self._is_packed:
            return
        tensors["weight"] = tensors["weight"].view(torch.uint8) ^ 0x88
        tensors["scales"] = tensors["scales"].t()
        tensors["minima"] = tensors["minima"].t().float() - 8 * tensors["scales"].float()


def _check_packing(named: dict[str, Any]) -> None:
    """Refuse words in the order of a kernel, and tensors of before version 2, whose layout is another."""
    data = named.get("_data")
    form = data.get("int4_packing_format") if isinstance(data, dict) else None
    form = str(form.get("_data") if isinstance(form, dict) else form or "plain").lower()
    if form != "plain" or named.get("_version", 2) != 2:
        raise CheckpointError(
            f"the model config's quantization_config.quant_type is {named.get('_type')} of version"
            f" {named.get('_version', 2)} with int4_packing_format {form!r}, which cannot be read; quantize the model"
            " with version 2 and int4_packing_format 'plain'"
        )


def _grid(shape: tuple[int, ...], scales: tuple[int, ...], dtype: torch.dtype) -> ScaleGrid:
    """What shares a scale, by how many there are along each side."""
    sides = [
        None if count == 1 else max(size // max(count, 1), 1) for size, count in zip(shape, scales, strict=False)
    ]
    rows, columns = sides if len(sides) == 2 else (None, None)
    return ScaleGrid(rows, columns, dtype)
