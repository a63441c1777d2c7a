"""Which schemes the panels of the CPU kernels hold without changing a value, and how their numbers get there.

Panels mean code * scale + minimum, with four or eight bits and a scale for each 16 or 32 inputs. Scales of 16 bits
times small integers are exact in float32, so nothing is rounded; with float32 scales and stored zero points the last
bit may be.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.scheme import TABLES, Scheme, StoredMatrix

# Elements whose values are integers once they are doubled.
_DOUBLED = {"E2M1": tuple(int(2 * value) for value in TABLES["E2M1"])}


def panel_format(scheme: Scheme) -> str | None:
    """The format of panels that holds such a matrix; None: there is none."""
    if scheme.block is not None and scheme.block.split is not None:
        return "code8_f32"
    if scheme.scales is None or scheme.block is not None or "group_index" in dict(scheme.roles):
        return None
    implied = None if scheme.zeros is None else scheme.zeros.implied
    stored_zeros = scheme.zeros is not None and implied is None
    bits = _integer_bits(scheme.element)
    if scheme.element in _DOUBLED and scheme.zeros is None:
        return _if_divides(scheme, 16, "code8_f32")
    if bits is None:
        return None
    if bits > 4:
        return _if_divides(scheme, 32, "code8_min_f32") if stored_zeros else _if_divides(scheme, 16, "code8_f32")
    around8 = scheme.element == "INT4" or implied == 8.0
    if around8 and scheme.scales.dtype == torch.float16 and scheme.second_scale == "none":
        return _if_divides(scheme, 32, "code4")
    return _if_divides(scheme, 32, "code4_min_f32")


def panel_parts(matrix: StoredMatrix) -> tuple[str, Tensor, Tensor, Tensor | None]:
    """(format, codes [rows, columns], scales and minima [rows, groups]) of a matrix that has a panel format."""
    scheme, tensors = matrix.scheme, matrix.tensors
    rows, columns = matrix.shape
    shape, format = (rows, columns), panel_format(scheme)
    assert format is not None
    if scheme.block is not None and scheme.block.split is not None:
        return format, *scheme.block.split(tensors["weight"]), None
    group = 16 if format == "code8_f32" else 32
    codes = scheme.codes(tensors, shape)
    scales = scheme.per_columns(scheme.scale_values(tensors), shape, group)
    if scheme.element in _DOUBLED:
        return format, torch.tensor(_DOUBLED[scheme.element], dtype=torch.int8)[codes.long()], scales / 2, None
    zeros = scheme.zero_values(tensors)
    if scheme.element == "INT4":  # two's complement
        codes, zeros = codes ^ 8, zeros + 8.0
    if format == "code4":
        return format, codes, scales, None
    if format == "code8_f32":
        return format, codes.int() - int(zeros), scales, None
    shift = 128 if scheme.element == "UINT8" else 0
    grid = zeros if isinstance(zeros, float) else scheme.per_columns(zeros, shape, group)
    return format, codes.int() - shift, scales, (shift - grid) * scales


def _integer_bits(element: str) -> int | None:
    digits = element.removeprefix("U").removeprefix("INT")
    return int(digits) if element.removeprefix("U").startswith("INT") and digits.isdecimal() else None


def _if_divides(scheme: Scheme, group: int, format: str) -> str | None:
    assert scheme.scales is not None
    columns = scheme.scales.columns
    return format if columns is None or columns % group == 0 else None
