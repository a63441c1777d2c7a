"""Eight-bit floats on GPUs: projections keep fp8 weights, a scale per output; activations are quantized as they come.

Embeddings and the head stay in the model's dtype: they are a small part of a step and decide the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.layers.fusion import Form
from quire.layers.quant.base import GroupedMethod, LinearMethod, MatrixSpec, Quantization
from quire.layers.quant.plain import Plain
from quire.layers.scheme import Scheme, StoredMatrix, Weight, as_tensor
from quire.layers.weights import empty_parameter
from quire.ops.base import Target
from quire.ops.fp8 import FP8, LINEAR_FP8, PREQUANTIZED_LINEAR_FP8, QuantizedActivations, quantize_rows

# Rows quantized at a time: float32 copies of a whole matrix would not be in any plan.
_ROWS = 4096


def has_fp8_rows(scheme: Scheme) -> bool:
    """Whether it is fp8 with a scale for the matrix or for each output: what the kernels multiply by as it is."""
    grid = scheme.scales
    return scheme.element == "E4M3" and grid is not None and grid.columns is None and grid.rows in (None, 1)


class Fp8Linear(LinearMethod):
    accepts = frozenset({Form.E4M3_PER_TOKEN})

    def __init__(self, spec: MatrixSpec) -> None:
        super().__init__(spec)
        self.weight = empty_parameter(spec.out_features, spec.in_features, dtype=FP8)
        self.scale = empty_parameter(spec.out_features, dtype=torch.float32)
        self._product = LINEAR_FP8.bind(spec.target)
        self._prequantized = PREQUANTIZED_LINEAR_FP8.bind(spec.target)

    def load(self, piece: int, rows: Weight) -> None:
        start = sum(self.spec.pieces[:piece])
        if isinstance(rows, StoredMatrix) and has_fp8_rows(rows.scheme):
            here = slice(start, start + rows.shape[0])
            self.weight.data[here] = rows.tensors["weight"].to(self.weight.device)
            outputs, inputs = rows.shape
            scales = rows.scheme.per_columns(rows.scheme.scale_values(rows.tensors), (outputs, inputs), inputs)
            self.scale.data[here] = scales.squeeze(1).to(self.scale.device)
            return
        tensor = as_tensor(rows)
        for first in range(0, tensor.shape[0], _ROWS):
            part = tensor[first : first + _ROWS].to(self.weight.device)
            here = slice(start + first, start + first + part.shape[0])
            self.weight.data[here], self.scale.data[here] = quantize_rows(part)

    def multiply(self, x: Tensor) -> Tensor:
        return self._product(x, self.weight, self.scale, self.bias)

    def multiply_quantized(self, x: QuantizedActivations) -> Tensor:
        return self._prequantized(x.values, x.scale, self.weight, self.scale, self.bias, x.dtype)

    @property
    def kept(self) -> str:
        return "fp8"

    def planned_bytes(self, schemes: Sequence[Scheme]) -> int:
        return self.spec.out_features * (self.spec.in_features + 4)

    def decodes(self, scheme: Scheme) -> bool:
        return False


class Fp8(Quantization):
    name = "fp8"
    _plain = Plain()

    def refuses(self, target: Target) -> str | None:
        platforms = sorted({name for kernels in LINEAR_FP8.implementations for name in kernels.platforms})
        if target.platform not in platforms:
            return f"it runs on {', '.join(platforms)}, not on {target.platform}; set --quantization int8"
        *_, reason = (implementation.refuses(target) for implementation in LINEAR_FP8.implementations)
        return None if reason is None else f"{reason}; leave --quantization out"

    def method(self, spec: MatrixSpec, schemes: Sequence[Scheme]) -> LinearMethod:
        return Fp8Linear(spec) if spec.role == "linear" else self._plain.method(spec, schemes)

    def grouped(self, spec: MatrixSpec, schemes: Sequence[Scheme]) -> GroupedMethod:
        return self._plain.grouped(spec, schemes)
