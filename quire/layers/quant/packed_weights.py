"""Matrices that a checkpoint stores quantized stay so on GPUs, and are unpacked inside the matmul.

Integers and floats of 4 and 8 bits with a scale for each group of inputs fit (GPTQ, AWQ, compressed-tensors, MXFP4,
NVFP4, fp8, GGUF blocks); whatever does not is kept in the model's dtype. Knows schemes, not files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.kernels.packed import CHUNK, E4M3, MANY_SLOTS, PackedWeight, fixed_split_bytes, pack_codes
from quire.layers.quant.base import (
    GroupedMethod,
    Joined,
    LinearMethod,
    MatrixMethod,
    MatrixSpec,
    Quantization,
    Shared,
)
from quire.layers.quant.fp8 import Fp8Linear
from quire.layers.quant.panels import check_numbers, integer_bits
from quire.layers.quant.plain import Plain
from quire.layers.quant.rounding import Rounding, has_fp8_rows
from quire.layers.quant.unpacked import UnpackedLinear
from quire.layers.scheme import Role, Scheme, StoredMatrix, Weight
from quire.layers.weights import empty_parameter
from quire.ops.base import Target
from quire.ops.fp8 import LINEAR_FP8
from quire.ops.grouped import GROUPED_DOWN, GROUPED_GATE_UP, PACKED_LINEAR, PACKED_SPARSE_MLP
from quire.ops.split_k import PartialSums, whole_or_parts
from quire.types.errors import CheckpointError, ConfigError

_MAX_EXPONENT = 127 + 64  # as stored, of scales that are powers of two
_MIDDLE = 8  # the code of 4-bit integers that stands for 0, where no other is said
_SCALES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class PackedForm:
    """What the pieces of a layer's matrices are kept as together."""

    name: str  # int4, int8, e2m1 or e4m3
    group: int  # columns of a scale
    scales: torch.dtype  # uint8: exponents
    has_zeros: bool
    has_minima: bool
    has_line_scale: bool

    @property
    def codes(self) -> torch.dtype:
        return {"int8": torch.int8, "e4m3": E4M3}.get(self.name, torch.uint8)

    @property
    def per_byte(self) -> int:
        return 2 if self.codes == torch.uint8 else 1

    def num_bytes(self, matrices: int, rows: int, columns: int) -> int:
        groups = columns // self.group * (self.scales.itemsize + int(self.has_zeros) + 4 * int(self.has_minima))
        return matrices * rows * (columns // self.per_byte + groups + 4 * int(self.has_line_scale))


def packed_form(in_features: int, schemes: Sequence[Scheme]) -> PackedForm | None:
    """How matrices of these schemes are kept quantized without changing a value; None: they cannot be."""
    schemes = [scheme if scheme.block is None else scheme.block.plain for scheme in schemes]
    kinds = {_kind(scheme, in_features) for scheme in schemes}
    kinds = {"int8"} if kinds == {"int4", "int8"} else kinds
    kind = kinds.pop()
    if kind is None or kinds or in_features % CHUNK:
        return None
    group = math.gcd(*(_columns(scheme, in_features) for scheme in schemes))
    group = group if group % CHUNK == 0 else 32 if group % 32 == 0 else 16
    zeros = {_zero_code(scheme) for scheme in schemes}
    has_minima = any("minima" in dict(scheme.roles) for scheme in schemes)
    other_zeros = kind == "int4" and zeros != {_MIDDLE}
    has_minima |= (other_zeros and group == 16) or (kind == "int8" and None in zeros)
    scales, has_line_scale = _scale_dtype(schemes)
    return PackedForm(kind, group, scales, other_zeros and not has_minima, has_minima, has_line_scale)


class PackedStore:
    """[count, outputs, in_features] in codes, filled piece by piece."""

    def __init__(self, spec: MatrixSpec, form: PackedForm, rounding: Rounding | None) -> None:
        lines = (spec.count, spec.out_features)
        groups = (*lines, spec.in_features // form.group)
        self.spec, self.form, self.rounding = spec, form, rounding
        self.codes = empty_parameter(*lines, spec.in_features // form.per_byte, dtype=form.codes)
        self.scales = empty_parameter(*groups, dtype=form.scales)
        self.zeros = empty_parameter(*groups, dtype=torch.uint8) if form.has_zeros else None
        self.minima = empty_parameter(*groups, dtype=torch.float32) if form.has_minima else None
        self.line_scale = empty_parameter(*lines, dtype=torch.float32) if form.has_line_scale else None
        self._rows_per_scale = 0  # divides the block height of every loaded piece; 0: none is loaded

    @property
    def weight(self) -> PackedWeight:
        is_float = self.form.name == "e2m1"
        shared = self._rows_per_scale or 1
        return PackedWeight(self.codes, self.scales, self.zeros, is_float, self.minima, self.line_scale, shared)

    def register(self, module: nn.Module) -> None:
        """Make the tensors parameters of the module."""
        for name in ("codes", "scales", "zeros", "minima", "line_scale"):
            module.register_parameter(name, self.__dict__[name])

    def load(self, index: int, piece: int, rows: Weight) -> None:
        """Piece number `piece` of matrix number `index`."""
        device, start = self.codes.device, sum(self.spec.pieces[:piece])
        if self.rounding is not None:
            rows = self.rounding.stored(self.spec, rows, device)
        assert isinstance(rows, StoredMatrix), "the form was chosen by the scheme"
        here = (index, slice(start, start + rows.shape[0]))
        rows, form = rows.plain(), self.form
        scheme, shape = rows.scheme, (rows.shape[0], rows.shape[1])
        assert scheme.scales is not None
        self._rows_per_scale = math.gcd(self._rows_per_scale, scheme.scales.rows or 0, *self.spec.pieces)
        tensors: dict[Role, Tensor] = {role: tensor.to(device) for role, tensor in rows.tensors.items()}
        codes, zeros = scheme.codes(tensors, shape), scheme.zero_values(tensors)
        check_numbers(scheme, codes, self.spec.path)
        if scheme.element == "INT4":  # two's complement
            codes, zeros = codes ^ 8, zeros + _MIDDLE
        if form.name == "int8":
            middle = int(zeros) if isinstance(zeros, float) else 128 if scheme.element == "UINT8" else 0
            codes, zeros = codes.int() - middle, zeros - middle
        self.codes.data[here] = pack_codes(codes) if form.per_byte == 2 else codes.to(form.codes)
        as_stored = form.scales == torch.uint8 or form.has_line_scale
        scales = tensors["scales"].view(torch.uint8) if as_stored else scheme.scale_values(tensors)
        scales = scheme.per_columns(scales, shape, form.group)
        if form.scales == torch.uint8 and int(scales.max()) > _MAX_EXPONENT:
            raise CheckpointError(
                f"{self.spec.path} has scales of 2 ** {int(scales.max()) - 127}, kernels take up to 2 ** 64;"
                " download the file again"
            )
        self.scales.data[here] = scales.contiguous().view(form.scales) if as_stored else scales.to(form.scales)
        if self.line_scale is not None:
            second = tensors["second_scale"].float()
            self.line_scale.data[here] = second if scheme.second_scale == "multiplies" else 1 / second
        grid = zeros if isinstance(zeros, float) else scheme.per_columns(zeros, shape, form.group)
        if self.zeros is not None:
            self.zeros.data[here] = torch.as_tensor(grid).to(torch.uint8)
        if self.minima is not None:
            found = tensors.get("minima")
            minima = -grid * scales.float() if found is None else scheme.per_columns(found, shape, form.group)
            self.minima.data[here] = minima


class _Packed(MatrixMethod):
    codes: nn.Parameter

    def __init__(self, spec: MatrixSpec, form: PackedForm, rounding: Rounding | None = None) -> None:
        super().__init__(spec)
        self._store = PackedStore(spec, form, rounding)
        self._store.register(self)

    @property
    def kept(self) -> str:
        return self._store.form.name

    @property
    def arithmetic(self) -> str:
        return f"unpacked in the kernel, activations in {str(self.spec.target.dtype).removeprefix('torch.')}"

    def planned_bytes(self, schemes: Sequence[Scheme]) -> int:
        if self._store.rounding is not None:
            self._store.rounding.check(self.spec, *schemes)
        return self._store.form.num_bytes(self.spec.count, self.spec.out_features, self.spec.in_features)


class PackedWeightLinear(_Packed, LinearMethod):
    def __init__(self, spec: MatrixSpec, form: PackedForm, rounding: Rounding | None = None) -> None:
        super().__init__(spec, form, rounding)
        self._matmul = PACKED_LINEAR.bind(spec.target)

    def load(self, piece: int, rows: Weight) -> None:
        self._store.load(0, piece, rows)

    def multiply(self, x: Tensor) -> Tensor:
        return self._matmul(x, self._store.weight, self.bias, "")

    def gated(self, activation: str) -> Callable[[Tensor], Tensor] | None:
        return lambda x: self._matmul(x, self._store.weight, self.bias, activation)

    def decodes(self, scheme: Scheme) -> bool:
        return False

    def workspace_bytes(self) -> int:
        """Of prompts the matrix is unpacked; where it must not matter how many tokens a step has, sums are split."""
        if self.spec.target.deterministic:
            return fixed_split_bytes(self.spec.out_features, self.spec.in_features)
        return self.spec.out_features * self.spec.in_features * self.spec.target.dtype.itemsize


class PackedWeightGrouped(_Packed, GroupedMethod):
    def __init__(self, spec: MatrixSpec, form: PackedForm, rounding: Rounding | None = None) -> None:
        super().__init__(spec, form, rounding)
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

    def joined(self, down: GroupedMethod, activation: str, in_parts: bool, shared: Shared = None) -> Joined | None:
        if not isinstance(down, PackedWeightGrouped) or shared is not None:
            return None
        run, first, second = PACKED_SPARSE_MLP.bind(self.spec.target), self._store.weight, down._store.weight

        def multiply(x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor | PartialSums:
            parts = run(x, expert_ids, weights, first, self.bias, second, down.bias, activation, in_parts)
            return whole_or_parts(parts, x.dtype)

        return multiply

    def workspace_bytes(self, num_tokens: int, top_k: int) -> int:
        """Of long prompts all experts are unpacked, as PackedWeightLinear's matrix is."""
        spec, rows = self.spec, super().workspace_bytes(num_tokens, top_k)
        if spec.target.deterministic or num_tokens * top_k < MANY_SLOTS * spec.count:
            return rows
        return rows + spec.count * spec.out_features * spec.in_features * spec.target.dtype.itemsize

    def _unpacked(self) -> Tensor:
        return self._store.weight.unpacked().to(self.spec.target.dtype)


class PackedWeights(Quantization):
    any_dtype = True
    _plain = Plain()

    def __init__(self, name: str = "stored", rounding: Rounding | None = None) -> None:
        """`rounding`: to what float weights are rounded; None: weights stay as they are stored."""
        self.name, self._rounding = name, rounding

    def serves(self, target: Target) -> bool:
        return any(implementation.refuses(target) is None for implementation in PACKED_LINEAR.implementations)

    def method(self, spec: MatrixSpec, schemes: Sequence[Scheme]) -> LinearMethod:
        if spec.role != "linear":
            return self._plain.method(spec, schemes)
        has_fp8 = schemes and all(has_fp8_rows(scheme) and scheme.activations != "none" for scheme in schemes)
        if has_fp8 and self._rounding is None and LINEAR_FP8.bind(spec.target) is not LINEAR_FP8.reference:
            return Fp8Linear(spec)
        form = self._form(spec, schemes)
        if form is not None and (self._rounding is None or self.serves(spec.target)):
            return PackedWeightLinear(spec, form, self._rounding)
        return self._plain.method(spec, schemes) if self._rounding is None else UnpackedLinear(spec, self._rounding)

    def grouped(self, spec: MatrixSpec, schemes: Sequence[Scheme]) -> GroupedMethod:
        # The outputs of one layer of experts are the inputs of the other: both are kept alike, for kernels to join.
        form = self._form(spec, schemes)
        if form is not None and not any(size % CHUNK for size in spec.pieces):
            return PackedWeightGrouped(spec, form, self._rounding)
        if self._rounding is None:
            return self._plain.grouped(spec, schemes)
        raise ConfigError(
            f"quantization is {self.name!r} but the experts of {spec.path} have {spec.in_features} inputs and"
            f" {spec.pieces[0]} outputs, which are not both multiples of {CHUNK}; leave --quantization out"
        )

    def _form(self, spec: MatrixSpec, schemes: Sequence[Scheme]) -> PackedForm | None:
        return packed_form(spec.in_features, schemes if self._rounding is None else [self._rounding.scheme])


def _kind(scheme: Scheme, in_features: int) -> str | None:
    """What codes of a scheme without blocks are kept as: int4, int8, e2m1 or e4m3; None: they are not."""
    if scheme.scales is None or "group_index" in dict(scheme.roles):
        return None
    columns, bits = _columns(scheme, in_features), integer_bits(scheme.element)
    if columns % 16 or in_features % columns:
        return None
    if bits is None:
        floats = {"E2M1": "e2m1", "E4M3": "e4m3"}
        return floats.get(scheme.element) if scheme.zeros is None else None
    return ("int4" if bits <= 4 else "int8") if scheme.zeros is None or _has_whole_zeros(scheme) else None


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


def _scale_dtype(schemes: Sequence[Scheme]) -> tuple[torch.dtype, bool]:
    """A type that holds all scales as they are, and whether second-level scales stay apart."""
    found = {scheme.scales.dtype for scheme in schemes if scheme.scales is not None}
    second = {scheme.second_scale != "none" for scheme in schemes}
    if len(found) > 1 or len(second) > 1:
        return torch.float32, False
    dtype = found.pop()
    if second.pop():
        return (E4M3, True) if dtype == E4M3 else (torch.float32, False)
    if dtype == torch.float8_e8m0fnu:
        return torch.uint8, False
    return dtype if dtype in _SCALES else torch.float32, False
