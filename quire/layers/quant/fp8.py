"""Eight-bit floats on GPUs: fp8 weights, a scale per output; activations are quantized as they come."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.layers.fusion import Form
from quire.layers.quant.base import LinearMethod, MatrixSpec
from quire.layers.quant.rounding import TO_FP8
from quire.layers.scheme import Scheme, StoredMatrix, Weight, scheme_of
from quire.layers.weights import empty_parameter
from quire.ops.fp8 import FP8, LINEAR_FP8, PREQUANTIZED_LINEAR_FP8, QuantizedActivations, quantize_rows

# Rows quantized at a time: float32 copies of a whole matrix would not be in any plan.
_ROWS = 4096


class Fp8Linear(LinearMethod):
    accepts = frozenset({Form.E4M3_PER_TOKEN})
    kept, arithmetic = "fp8", "activations in fp8"

    def __init__(self, spec: MatrixSpec) -> None:
        super().__init__(spec)
        self.weight = empty_parameter(spec.out_features, spec.in_features, dtype=FP8)
        self.scale = empty_parameter(spec.out_features, dtype=torch.float32)
        self._matmul = LINEAR_FP8.bind(spec.target)
        self._prequantized = PREQUANTIZED_LINEAR_FP8.bind(spec.target)

    def load(self, piece: int, rows: Weight) -> None:
        TO_FP8.check(self.spec, scheme_of(rows))
        start = sum(self.spec.pieces[:piece])
        if isinstance(rows, StoredMatrix):
            here = slice(start, start + rows.shape[0])
            self.weight.data[here] = rows.tensors["weight"].to(self.weight.device)
            outputs, inputs = rows.shape
            scales = rows.scheme.per_columns(rows.scheme.scale_values(rows.tensors), (outputs, inputs), inputs)
            self.scale.data[here] = scales.squeeze(1).to(self.scale.device)
            return
        for first in range(0, rows.shape[0], _ROWS):
            part = rows[first : first + _ROWS].to(self.weight.device)
            here = slice(start + first, start + first + part.shape[0])
            self.weight.data[here], self.scale.data[here] = quantize_rows(part)

    def multiply(self, x: Tensor) -> Tensor:
        return self._matmul(x, self.weight, self.scale, self.bias)

    def multiply_quantized(self, x: QuantizedActivations) -> Tensor:
        return self._prequantized(x.values, x.scale, self.weight, self.scale, self.bias, x.dtype)

    def quantizes(self, scheme: Scheme) -> bool:
        return True

    def planned_bytes(self, schemes: Sequence[Scheme]) -> int:
        TO_FP8.check(self.spec, *schemes)
        return self.spec.out_features * (self.spec.in_features + 4)

    def decodes(self, scheme: Scheme) -> bool:
        return False
