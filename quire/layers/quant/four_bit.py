"""Matrices and experts that a checkpoint stores in 4 bits stay so on GPUs, and are unpacked inside the matmul.

Integers with a scale for each group of inputs (GPTQ, AWQ, compressed-tensors) and E2M1 (MXFP4) fit; whatever does not
is kept in the model's dtype. Knows schemes, not files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.packed import CHUNK, PackedWeight, pack_codes
from quire.layers.quant.base import GroupedMethod, LinearMethod, MatrixSpec, Quantization
from quire.layers.quant.plain import Plain
from quire.layers.scheme import Role, Scheme, StoredMatrix, Weight
from quire.layers.weights import empty_parameter
from quire.ops.base import Target
from quire.ops.grouped import GROUPED_DOWN, GROUPED_GATE_UP
from quire.ops.packed import PACKED_LINEAR, PACKED_SPARSE_MLP
from quire.ops.split_k import PartialSums

_MIN_GROUP = 32
_MIDDLE = 8  # the code of integers that stands for 0, where no other is said
_SCALES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class PackedForm:
    """What the pieces of a layer's matrices are kept as together."""

    group: int  # columns of a scale
    is_float: bool
    scales: torch.dtype  # uint8: exponents
    has_zeros: bool

    def num_bytes(self, matrices: int, rows: int, columns: int) -> int:
        groups = columns // self.group * (self.scales.itemsize + int(self.has_zeros))
        return matrices * rows * (columns // 2 + groups)


def packed_form(in_features: int, schemes: Sequence[Scheme]) -> PackedForm | None:
    """How matrices of these schemes are kept in 4 bits without changing a value; None: they cannot be."""
    if in_features % CHUNK or not all(_fits(scheme, in_features) for scheme in schemes):
        return None
    floats = {scheme.element == "E2M1" for scheme in schemes}
    if len(floats) > 1:
        return None
    group = math.gcd(*(_columns(scheme, in_features) for scheme in schemes))
    return PackedForm(
        group=_MIN_GROUP if group % CHUNK else group,
        is_float=floats.pop(),
        scales=_scale_dtype(schemes),
        has_zeros=any(_zero_code(scheme) != _MIDDLE for scheme in schemes if scheme.element != "E2M1"),
    )


class PackedStore:
    """[count, outputs, in_features] in 4 bits, filled piece by piece."""

    def __init__(self, spec: MatrixSpec, form: PackedForm) -> None:
        groups = (spec.count, spec.out_features, spec.in_features // form.group)
        self.spec, self.form = spec, form
        self.codes = empty_parameter(spec.count, spec.out_features, spec.in_features // 2, dtype=torch.uint8)
        self.scales = empty_parameter(*groups, dtype=form.scales)
        self.zeros = empty_parameter(*groups, dtype=torch.uint8) if form.has_zeros else None

    @property
    def weight(self) -> PackedWeight:
        return PackedWeight(self.codes, self.scales, self.zeros, self.form.is_float)

    def load(self, index: int, piece: int, rows: Weight) -> None:
        """Piece number `piece` of matrix number `index`."""
        assert isinstance(rows, StoredMatrix), "the form was chosen by the scheme"
        device, start = self.codes.device, sum(self.spec.pieces[:piece])
        here = (index, slice(start, start + rows.shape[0]))
        scheme, shape = rows.scheme, (rows.shape[0], rows.shape[1])
        tensors: dict[Role, Tensor] = {role: tensor.to(device) for role, tensor in rows.tensors.items()}
        codes = scheme.codes(tensors, shape)
        self.codes.data[here] = pack_codes(codes ^ 8 if scheme.element == "INT4" else codes)
        is_bytes = self.form.scales == torch.uint8
        scales = tensors["scales"].view(torch.uint8) if is_bytes else scheme.scale_values(tensors)
        self.scales.data[here] = scheme.per_columns(scales, shape, self.form.group).to(self.form.scales)
        if self.zeros is not None:
            self.zeros.data[here] = self._zeros(scheme, tensors, shape)

    def _zeros(self, scheme: Scheme, tensors: dict[Role, Tensor], shape: tuple[int, int]) -> Tensor:
        zeros = scheme.zero_values(tensors) + (_MIDDLE if scheme.element == "INT4" else 0)
        if isinstance(zeros, float):
            return torch.tensor(int(zeros), dtype=torch.uint8)
        return scheme.per_columns(zeros, shape, self.form.group).to(torch.uint8)


class FourBitLinear(LinearMethod):
    def __init__(self, spec: MatrixSpec, form: PackedForm) -> None:
        super().__init__(spec)
        self._store = PackedStore(spec, form)
        self.codes, self.scales, self.zeros = self._store.codes, self._store.scales, self._store.zeros
        self._product = PACKED_LINEAR.bind(spec.target)

    def load(self, piece: int, rows: Weight) -> None:
        self._store.load(0, piece, rows)

    def multiply(self, x: Tensor) -> Tensor:
        return self._product(x, self._store.weight, self.bias, "")

    def gated(self, activation: str) -> Callable[[Tensor], Tensor] | None:
        return lambda x: self._product(x, self._store.weight, self.bias, activation)

    @property
    def kept(self) -> str:
        return "4 bits"

    def planned_bytes(self, schemes: Sequence[Scheme]) -> int:
        return self._store.form.num_bytes(1, self.spec.out_features, self.spec.in_features)

    def decodes(self, scheme: Scheme) -> bool:
        return False

    def workspace_bytes(self) -> int:
        """Of prompts the matrix is unpacked, unless it must not matter how many tokens a step has."""
        if self.spec.target.deterministic:
            return 0
        return self.spec.out_features * self.spec.in_features * self.spec.target.dtype.itemsize


class FourBitGrouped(GroupedMethod):
    def __init__(self, spec: MatrixSpec, form: PackedForm) -> None:
        super().__init__(spec)
        self._store = PackedStore(spec, form)
        self.codes, self.scales, self.zeros = self._store.codes, self._store.scales, self._store.zeros
        self._gate_up, self._down = GROUPED_GATE_UP.bind(spec.target), GROUPED_DOWN.bind(spec.target)

    @property
    def backend(self) -> str:
        return "torch" if PACKED_SPARSE_MLP.bind(self.spec.target) is PACKED_SPARSE_MLP.reference else "triton"

    def load(self, expert: int, piece: int, rows: Weight) -> None:
        self._store.load(expert, piece, rows)

    def gate_up(self, x: Tensor, expert_ids: Tensor, activation: str) -> Tensor:
        return self._gate_up(x, expert_ids, self._unpacked(), self.bias, activation)

    def down(self, a: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        return self._down(a, expert_ids, weights, self._unpacked(), self.bias)

    def joined(
        self,
        down: GroupedMethod,
        activation: str,
        in_parts: bool,
        shared: tuple[LinearMethod, LinearMethod] | None = None,
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor | PartialSums] | None:
        if not isinstance(down, FourBitGrouped) or shared is not None:
            return None
        run, first, second = PACKED_SPARSE_MLP.bind(self.spec.target), self._store.weight, down._store.weight

        def multiply(x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor | PartialSums:
            parts = run(x, expert_ids, weights, first, self.bias, second, down.bias, activation, in_parts)
            return parts[0] if parts.shape[0] == 1 else PartialSums(parts, x.dtype)

        return multiply

    @property
    def kept(self) -> str:
        return "4 bits"

    def planned_bytes(self, schemes: Sequence[Scheme]) -> int:
        return self._store.form.num_bytes(self.spec.count, self.spec.out_features, self.spec.in_features)

    def _unpacked(self) -> Tensor:
        return self._store.weight.unpacked().to(self.spec.target.dtype)


class FourBit(Quantization):
    name = "four_bit"
    any_dtype = True
    _plain = Plain()

    def refuses(self, target: Target) -> str | None:
        reasons = [implementation.refuses(target) for implementation in PACKED_LINEAR.implementations]
        return None if None in reasons else f"it {reasons[0]}; leave --quantization out"

    def method(self, spec: MatrixSpec, schemes: Sequence[Scheme]) -> LinearMethod:
        form = packed_form(spec.in_features, schemes) if spec.role == "linear" else None
        return self._plain.method(spec, schemes) if form is None else FourBitLinear(spec, form)

    def grouped(self, spec: MatrixSpec, schemes: Sequence[Scheme]) -> GroupedMethod:
        # The outputs of one layer of experts are the inputs of the other: both are kept alike, for kernels to join.
        form = packed_form(spec.in_features, schemes)
        fits = form is not None and not any(size % CHUNK for size in spec.pieces)
        return FourBitGrouped(spec, form) if form is not None and fits else self._plain.grouped(spec, schemes)


def _fits(scheme: Scheme, in_features: int) -> bool:
    if scheme.scales is None or scheme.packing is None or scheme.packing.bits != 4:
        return False
    if scheme.element not in ("INT4", "UINT4", "E2M1") or "group_index" in dict(scheme.roles):
        return False
    if scheme.zeros is not None and (scheme.element == "E2M1" or not _has_whole_zeros(scheme)):
        return False
    columns = _columns(scheme, in_features)
    return columns % _MIN_GROUP == 0 and in_features % columns == 0


def _has_whole_zeros(scheme: Scheme) -> bool:
    """Zero points are integers: an implied one, or packed codes."""
    assert scheme.zeros is not None
    implied = scheme.zeros.implied
    return scheme.zeros.packing is not None if implied is None else implied.is_integer()


def _columns(scheme: Scheme, in_features: int) -> int:
    assert scheme.scales is not None
    return scheme.scales.columns or in_features


def _zero_code(scheme: Scheme) -> float | None:
    """The code that stands for 0 when codes count from 0; None: each group has its own."""
    if scheme.zeros is not None and scheme.zeros.implied is None:
        return None
    implied = 0.0 if scheme.zeros is None or scheme.zeros.implied is None else scheme.zeros.implied
    return implied + (_MIDDLE if scheme.element == "INT4" else 0)


def _scale_dtype(schemes: Sequence[Scheme]) -> torch.dtype:
    """A type that holds all scales as they are."""
    found = {scheme.scales.dtype for scheme in schemes if scheme.scales is not None}
    if len(found) > 1 or any(scheme.second_scale != "none" for scheme in schemes):
        return torch.float32
    dtype = found.pop()
    if dtype == torch.float8_e8m0fnu:
        return torch.uint8
    return dtype if dtype in _SCALES else torch.float32
