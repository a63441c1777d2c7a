"""Float weights that are rounded while they are loaded: to what, and how. The result is a stored matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.layers.quant.base import MatrixSpec
from quire.layers.scheme import Packing, Role, ScaleGrid, Scheme, StoredMatrix, Weight, ZeroPoints, scheme_of
from quire.ops.fp8 import quantize_rows
from quire.types.errors import ConfigError

_NIBBLES = Packing(torch.uint8, (0, 1))
_ROLES: tuple[tuple[Role, str], ...] = (("weight", "weight"), ("scales", "weight_scale"))
_BETWEEN = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])  # where one magnitude of E2M1 ends
MXFP4 = Scheme(
    "E2M1",
    packing=_NIBBLES,
    scales=ScaleGrid(1, 32, torch.float8_e8m0fnu),
    roles=(("weight", "weight_packed"), ("scales", "weight_scale")),
)
_E4M3 = Scheme("E4M3", scales=ScaleGrid(1, None, torch.float32), roles=_ROLES)
_INT8 = Scheme("INT8", scales=ScaleGrid(1, 64, torch.bfloat16), roles=_ROLES)
_INT4 = Scheme(
    "UINT4",
    packing=_NIBBLES,
    scales=ScaleGrid(1, 32, torch.bfloat16),
    zeros=ZeroPoints(packing=_NIBBLES),
    roles=(*_ROLES, ("zeros", "weight_zero_point")),
)


def has_fp8_rows(scheme: Scheme) -> bool:
    """Whether it is fp8 with a scale for the matrix or for each output: what the kernels multiply by as it is."""
    grid = scheme.scales
    return scheme.element == "E4M3" and grid is not None and grid.columns is None and grid.rows in (None, 1)


@dataclass(frozen=True)
class Rounding:
    scheme: Scheme
    round: Callable[[Tensor], dict[Role, Tensor]]  # [rows, columns], whole groups of columns
    keeps: Callable[[Scheme], bool] = lambda scheme: False  # which quantized weights need no rounding

    def check(self, spec: MatrixSpec, *schemes: Scheme) -> None:
        """Refuse weights that are quantized in another scheme, and those that are no whole groups."""
        name, grid = spec.target.quantization, self.scheme.scales
        quantized = next((each.element for each in schemes if not each.is_float and not self.keeps(each)), None)
        if quantized is not None:
            raise ConfigError(
                f"quantization is {name!r}, which quantizes float weights while they are loaded, but {spec.path}"
                f" is quantized already (its weights are {quantized}); leave --quantization out"
            )
        if grid is not None and grid.columns is not None and spec.in_features % grid.columns:
            raise ConfigError(
                f"quantization is {name!r} but {spec.path} has {spec.in_features} inputs, which are no whole"
                f" groups of {grid.columns}; leave --quantization out"
            )

    def stored(self, spec: MatrixSpec, rows: Weight, device: torch.device) -> StoredMatrix:
        """A piece of a layer's matrix in the scheme, or as it is kept, rounded on a device."""
        self.check(spec, scheme_of(rows))
        if isinstance(rows, StoredMatrix):
            return rows
        return StoredMatrix(self.scheme, tuple(rows.shape), self.round(rows.to(device)))


def e2m1_bytes(values: Tensor) -> Tensor:
    """Values [rows, columns] -> the nearest 4-bit floats [rows, columns / 2], the first in the low bits."""
    return _bytes(torch.bucketize(values.abs().contiguous(), _BETWEEN.to(values.device)) + 8 * (values < 0))


def _bytes(codes: Tensor) -> Tensor:
    codes = codes.to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4


def round_to_mxfp4(weight: Tensor) -> StoredMatrix:
    """weight [rows, columns], whole groups of columns."""
    return StoredMatrix(MXFP4, tuple(weight.shape), _to_mxfp4(weight))


def _to_mxfp4(weight: Tensor) -> dict[Role, Tensor]:
    groups = weight.float().unflatten(1, (-1, 32))
    largest = groups.abs().amax(-1).clamp_min(2.0**-120)
    exponents = torch.floor(torch.log2(largest)).int() - 2  # the largest magnitude lies in [4, 8), and 6 is the most
    packed = e2m1_bytes(torch.ldexp(groups, -exponents.unsqueeze(-1)).flatten(1))
    return {"weight": packed, "scales": (exponents + 127).to(torch.uint8)}


def _to_fp8(weight: Tensor) -> dict[Role, Tensor]:
    codes, scales = quantize_rows(weight)
    return {"weight": codes, "scales": scales.unsqueeze(1)}


def _to_int8(weight: Tensor) -> dict[Role, Tensor]:
    groups = weight.float().unflatten(1, (-1, 64))
    scales = (groups.abs().amax(-1) / 127).clamp_min(1e-30).bfloat16()
    codes = (groups / scales.float().unsqueeze(-1)).round().clamp(-127, 127)
    return {"weight": codes.flatten(1).to(torch.int8), "scales": scales}


def _to_int4(weight: Tensor) -> dict[Role, Tensor]:
    groups = weight.float().unflatten(1, (-1, 32))
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    scales = ((high - low) / 15).clamp_min(1e-30).bfloat16()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    codes = (groups / scales.float().unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(0, 15)
    zeros = torch.nn.functional.pad(zeros, (0, zeros.shape[1] % 2))  # whole bytes
    return {"weight": _bytes(codes.flatten(1)), "scales": scales, "zeros": _bytes(zeros)}


TO_MXFP4 = Rounding(MXFP4, _to_mxfp4)
TO_FP8 = Rounding(_E4M3, _to_fp8, has_fp8_rows)
TO_INT8 = Rounding(_INT8, _to_int8)
TO_INT4 = Rounding(_INT4, _to_int4)
