"""4-bit floats with a power of two for each 32: float weights are rounded to them while they are loaded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.packed import CHUNK
from quire.layers.quant.base import GroupedMethod, LinearMethod, MatrixSpec, Quantization
from quire.layers.quant.packed_weights import PackedWeightGrouped, PackedWeightLinear, packed_form
from quire.layers.quant.plain import Plain
from quire.layers.quant.unpacked import UnpackedLinear
from quire.layers.scheme import Packing, ScaleGrid, Scheme, StoredMatrix, Weight, as_tensor, scheme_of
from quire.ops.base import Target
from quire.ops.packed import PACKED_LINEAR
from quire.types.errors import ConfigError

GROUP = 32
MXFP4 = Scheme(
    "E2M1",
    packing=Packing(torch.uint8, (0, 1)),
    scales=ScaleGrid(1, GROUP, torch.float8_e8m0fnu),
    roles=(("weight", "weight_packed"), ("scales", "weight_scale")),
)
_BETWEEN = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])  # where one magnitude ends and the next begins


def e2m1_bytes(values: Tensor) -> Tensor:
    """Values [rows, columns] -> the nearest 4-bit floats [rows, columns / 2], the first in the low bits."""
    codes = (torch.bucketize(values.abs(), _BETWEEN.to(values.device)) + 8 * (values < 0)).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4


def round_to_mxfp4(weight: Tensor) -> StoredMatrix:
    """weight [rows, columns], whole groups of columns."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(-1).clamp_min(2.0**-120)
    exponents = torch.floor(torch.log2(largest)).int() - 2  # the largest magnitude lies in [4, 8), and 6 is the most
    packed = e2m1_bytes(torch.ldexp(groups, -exponents.unsqueeze(-1)).flatten(1))
    return StoredMatrix(MXFP4, tuple(weight.shape), {"weight": packed, "scales": (exponents + 127).to(torch.uint8)})


class Mxfp4Linear(UnpackedLinear):
    def load(self, piece: int, rows: Weight) -> None:
        _check(self.spec, scheme_of(rows))
        super().load(piece, round_to_mxfp4(as_tensor(rows)))

    def planned_bytes(self, schemes: Sequence[Scheme]) -> int:
        _check(self.spec, *schemes)
        return super().planned_bytes([MXFP4] * len(schemes))


class Mxfp4Packed(PackedWeightLinear):
    """Where kernels multiply by it."""

    def load(self, piece: int, rows: Weight) -> None:
        _check(self.spec, scheme_of(rows))
        super().load(piece, round_to_mxfp4(as_tensor(rows).to(self.codes.device)))

    def planned_bytes(self, schemes: Sequence[Scheme]) -> int:
        _check(self.spec, *schemes)
        return super().planned_bytes(schemes)


class Mxfp4Grouped(PackedWeightGrouped):
    def load(self, expert: int, piece: int, rows: Weight) -> None:
        _check(self.spec, scheme_of(rows))
        super().load(expert, piece, round_to_mxfp4(as_tensor(rows).to(self.codes.device)))

    def planned_bytes(self, schemes: Sequence[Scheme]) -> int:
        _check(self.spec, *schemes)
        return super().planned_bytes(schemes)


class Mxfp4(Quantization):
    name = "mxfp4"
    _plain = Plain()

    def refuses(self, target: Target) -> str | None:
        return None

    def method(self, spec: MatrixSpec, schemes: Sequence[Scheme]) -> LinearMethod:
        if spec.role != "linear":
            return self._plain.method(spec, schemes)
        form = packed_form(spec.in_features, [MXFP4])
        served = PACKED_LINEAR.bind(spec.target) is not PACKED_LINEAR.reference
        return Mxfp4Packed(spec, form) if served and form is not None else Mxfp4Linear(spec)

    def grouped(self, spec: MatrixSpec, schemes: Sequence[Scheme]) -> GroupedMethod:
        form = packed_form(spec.in_features, [MXFP4])
        if form is None or any(size % CHUNK for size in spec.pieces):
            raise ConfigError(
                f"quantization is 'mxfp4' but the experts of {spec.path} have {spec.in_features} inputs and"
                f" {spec.pieces[0]} outputs, which are not both multiples of {CHUNK}; leave --quantization out"
            )
        return Mxfp4Grouped(spec, form)


def _check(spec: MatrixSpec, *schemes: Scheme) -> None:
    quantized = next((scheme.element for scheme in schemes if not scheme.is_float), None)
    if quantized is not None:
        raise ConfigError(
            f"quantization is 'mxfp4', which quantizes float weights while they are loaded, but {spec.path}"
            f" is quantized already (its weights are {quantized}); leave --quantization out"
        )
    if spec.in_features % GROUP:
        raise ConfigError(
            f"quantization is 'mxfp4' but {spec.path} has {spec.in_features} inputs, which are no whole"
            f" groups of {GROUP}; leave --quantization out"
        )
