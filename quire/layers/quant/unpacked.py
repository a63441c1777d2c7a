"""Weights stay in memory as the checkpoint stores them and are unpacked for each matmul, on any platform.

Without kernels that multiply by a scheme this is slower than plain weights: it is for models that do not fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.layers.quant.base import LinearMethod, MatrixSpec, Quantization
from quire.layers.quant.fp8 import Fp8Linear
from quire.layers.quant.plain import Plain
from quire.layers.quant.rounding import Rounding, has_fp8_rows
from quire.layers.scheme import GRIDS, Role, Scheme, StoredMatrix, Weight, as_tensor
from quire.ops.fp8 import LINEAR_FP8
from quire.ops.linear import DIRECT, LINEAR_TRANSPOSED

_KEPT: tuple[Role, ...] = (*GRIDS, "second_scale", "group_index")


class UnpackedLinear(LinearMethod):
    """One stored matrix per piece, each in its own scheme; plain pieces and GGUF blocks are in the model's dtype."""

    kept, arithmetic = "stored codes", "unpacked for each matmul"

    def __init__(self, spec: MatrixSpec, rounding: Rounding | None = None) -> None:
        super().__init__(spec)
        self._device, self._rounding = torch.get_default_device(), rounding
        self._pieces: dict[int, Weight] = {}
        self._matmul = LINEAR_TRANSPOSED.bind(spec.target)

    def load(self, piece: int, rows: Weight) -> None:
        rows = rows if self._rounding is None else self._rounding.stored(self.spec, rows, self._device)
        if isinstance(rows, StoredMatrix) and not self.decodes(rows.scheme):
            tensors = {
                role: self._keep(f"{role}{piece}", _as_kept(rows.scheme, role, tensor))
                for role, tensor in rows.tensors.items()
                if role in _KEPT
            }
            self._pieces[piece] = StoredMatrix(rows.scheme, rows.shape, tensors)
        else:
            self._pieces[piece] = self._keep(f"weight{piece}", as_tensor(rows).to(self.spec.target.dtype))

    def _keep(self, name: str, tensor: Tensor) -> Tensor:
        kept = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        kept.copy_(tensor)
        self.register_buffer(name, kept, persistent=False)
        return kept

    def multiply(self, x: Tensor) -> Tensor:
        pieces = [as_tensor(self._pieces[piece]).to(x.dtype) for piece in sorted(self._pieces)]
        return self._matmul(x, torch.cat(pieces), self.bias, DIRECT)

    def planned_bytes(self, schemes: Sequence[Scheme]) -> int:
        if self._rounding is not None:
            self._rounding.check(self.spec, *schemes)
            schemes = [self._rounding.scheme] * len(schemes)
        sizes = zip(self.spec.pieces, schemes, strict=True)
        return sum(self._kept_bytes(scheme, (size, self.spec.in_features)) for size, scheme in sizes)

    def decodes(self, scheme: Scheme) -> bool:
        return scheme.block is not None or (scheme.scales is None and not scheme.is_float)

    def _kept_bytes(self, scheme: Scheme, shape: tuple[int, int]) -> int:
        if scheme.is_float or self.decodes(scheme):
            return shape[0] * shape[1] * self.spec.target.dtype.itemsize
        assert scheme.scales is not None
        sizes: dict[Role, int] = {
            "weight": 1 if scheme.packing is None else scheme.packing.word.itemsize,
            "scales": scheme.scales.dtype.itemsize,
            "zeros": 4,
            "minima": 4,
        }
        roles, total = dict(scheme.roles), 0
        for role in roles.keys() & sizes.keys():
            counts = (scheme.stored_count(axis, role, shape[axis]) for axis in (0, 1))
            total += next(counts) * next(counts) * sizes[role]
        total += 4 * shape[1] if "group_index" in roles else 0
        return total + (4 if "second_scale" in roles else 0)


def _as_kept(scheme: Scheme, role: Role, tensor: Tensor) -> Tensor:
    """What a role's tensor is kept as, the same type whatever a checkpoint has."""
    if role == "group_index":
        return tensor.int()
    if role == "second_scale":
        return tensor.float().reshape(1)
    if role == "zeros" and scheme.zeros is not None and scheme.zeros.packing is None:
        return tensor.float()
    return tensor


class Unpacked(Quantization):
    name = "unpacked"
    _plain = Plain()

    def method(self, spec: MatrixSpec, schemes: Sequence[Scheme]) -> LinearMethod:
        if spec.role != "linear" or all(scheme.is_float for scheme in schemes):
            return self._plain.method(spec, schemes)
        served = LINEAR_FP8.bind(spec.target) is not LINEAR_FP8.reference
        if served and all(has_fp8_rows(scheme) for scheme in schemes):
            return Fp8Linear(spec)
        return UnpackedLinear(spec)
