"""Which schemes the panels of the CPU kernels hold without changing a value, and how their numbers get there.

Panels mean code * scale + minimum, with four or eight bits and a scale for each 16 or 32 inputs. Scales of 16 bits
times small integers are exact in float32, so nothing is rounded; with float32 scales and stored zero points the last
bit may be. Where an index says which group a column belongs to, columns are sorted by their groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.scheme import Scheme, StoredMatrix
from quire.types.errors import CheckpointError

_FLOATS = ("NF4", "FP4", "E4M3", "E5M2")


def panel_format(scheme: Scheme) -> str | None:
    """The format of panels that holds such a matrix; None: there is none."""
    if scheme.block is not None:
        return panel_format(scheme.block.plain)
    if scheme.scales is None:
        return None
    implied = None if scheme.zeros is None else scheme.zeros.implied
    stored_zeros = scheme.zeros is not None and implied is None
    bits = integer_bits(scheme.element)
    if scheme.element == "E2M1" and scheme.zeros is None:
        return _if_divides(scheme, 32, "e2m1") or _if_divides(scheme, 16, "e2m1_16")
    if scheme.element in _FLOATS and scheme.zeros is None:
        return _if_divides(scheme, 32, scheme.element.lower())
    if bits is None:
        return None
    has_minima = stored_zeros or "minima" in dict(scheme.roles)
    if bits > 4:
        if has_minima:
            return _if_divides(scheme, 32, "code8_min_f32")
        return _if_divides(scheme, 32, "code8_32") or _if_divides(scheme, 16, "code8_f32")
    around8 = scheme.element == "INT4" or implied == 8.0
    if around8 and scheme.scales.dtype == torch.float16 and scheme.second_scale == "none":
        return _if_divides(scheme, 32, "code4")
    return _if_divides(scheme, 32, "code4_min_f32") or (
        _if_divides(scheme, 16, "code4_min_16") if has_minima else None
    )


def panel_parts(matrix: StoredMatrix, path: str) -> tuple[str, Tensor, Tensor, Tensor | None, Tensor | None]:
    """(format, codes [rows, columns], scales and minima [rows, groups], order) of a layer's matrix."""
    matrix = matrix.plain()
    scheme, tensors = matrix.scheme, matrix.tensors
    rows, columns = matrix.shape
    shape, format = (rows, columns), panel_format(scheme)
    assert format is not None
    group = 16 if format == "code8_f32" or format.endswith("_16") else 32
    codes, order = scheme.codes(tensors, shape), _order(matrix, path)
    codes = codes if order is None else codes[:, order]
    scales = scheme.per_columns(scheme.scale_values(tensors), shape, group)
    check_numbers(scheme, codes, path)
    if scheme.element in _FLOATS:
        return format, codes, scales, None, order
    if scheme.element == "E2M1":  # panels have doubled ones
        return format, codes, scales / 2, None, order
    if "minima" in tensors:
        return format, codes, scales, scheme.per_columns(tensors["minima"], shape, group), order
    zeros = scheme.zero_values(tensors)
    if scheme.element == "INT4":  # two's complement
        codes, zeros = codes ^ 8, zeros + 8.0
    if format == "code4":
        return format, codes, scales, None, order
    if format in ("code8_f32", "code8_32"):
        return format, codes.int() - int(zeros), scales, None, order
    shift = 128 if scheme.element == "UINT8" else 0
    grid = zeros if isinstance(zeros, float) else scheme.per_columns(zeros, shape, group)
    return format, codes.int() - shift, scales, (shift - grid) * scales, order


def _order(matrix: StoredMatrix, path: str) -> Tensor | None:
    """The columns in the order of their groups; None: that is their own."""
    index, grid = matrix.tensors.get("group_index"), matrix.scheme.scales
    if index is None or grid is None or grid.columns is None:
        return None
    groups, order = index.long().sort(stable=True)
    columns = torch.arange(matrix.shape[1])
    if not groups.equal(columns // grid.columns):
        raise CheckpointError(
            f"the group index of {path} does not give {grid.columns} columns to each group; set --quantization none"
        )
    return None if order.equal(columns) else order


def check_numbers(scheme: Scheme, codes: Tensor, path: str) -> None:
    """Refuse NaN in weights of E4M3, which kernels do not know."""
    if scheme.element == "E4M3" and bool((codes.view(torch.uint8) & 127 == 127).any()):
        raise CheckpointError(f"{path} has fp8 weights that are no numbers; download the file again")


def integer_bits(element: str) -> int | None:
    """Of an element such as "UINT4"; None: it is no integer."""
    digits = element.removeprefix("U").removeprefix("INT")
    return int(digits) if element.removeprefix("U").startswith("INT") and digits.isdecimal() else None


def _if_divides(scheme: Scheme, group: int, format: str) -> str | None:
    assert scheme.scales is not None
    columns = scheme.scales.columns
    return format if columns is None or columns % group == 0 else None
