"""Schemes: any layout decodes to what a loop over its elements gives, whole or cut."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.layers.scheme import (
    F32,
    Block,
    Packing,
    Role,
    ScaleGrid,
    Scheme,
    StoredMatrix,
    ZeroPoints,
    as_tensor,
    float_scheme,
    part_of,
    part_scheme,
    scheme_of,
)
from quire.loader.quantized.base import packed_shape, stored_shape

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
VALUES = {
    "UINT4": lambda code: code,
    "INT4": lambda code: code - 16 if code > 7 else code,
    "E2M1": lambda code: -E2M1[code - 8] if code > 7 else E2M1[code],
}
ORDERS = {torch.uint8: [(0, 1), (1, 0)], torch.int32: [tuple(range(8)), (0, 4, 1, 5, 2, 6, 3, 7)]}
ROLES: tuple[tuple[Role, str], ...] = (("weight", "weight_packed"), ("scales", "weight_scale"))


def pack(codes: Tensor, packing: Packing) -> Tensor:
    """Element by element, as the definition says."""
    count = len(packing.order)
    codes = codes if packing.axis == 1 else codes.t()
    words = torch.zeros(codes.shape[0], -(-codes.shape[1] // count), dtype=torch.int64)
    bits = 8 * packing.word.itemsize // count
    for row in range(codes.shape[0]):
        for column in range(codes.shape[1]):
            words[row, column // count] |= int(codes[row, column]) << bits * packing.order[column % count]
    words = words if packing.axis == 1 else words.t()
    if packing.word == torch.int32:
        words = words - ((words >> 31) << 32)  # as a signed number
    return words.contiguous().to(packing.word)


@dataclass
class Case:
    matrix: StoredMatrix
    values: Tensor


@st.composite
def cases(draw: st.DrawFn) -> Case:
    element = draw(st.sampled_from(sorted(VALUES)))
    word = draw(st.sampled_from(sorted(ORDERS, key=str)))
    packing = Packing(word, draw(st.sampled_from(ORDERS[word])), draw(st.integers(0, 1)))
    shape = tuple(draw(st.integers(1, 3)) * 8 for _ in range(2))
    sides = tuple(draw(st.sampled_from([None, 1, 8])) for _ in range(2))
    grid = ScaleGrid(*sides, torch.float32)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    groups = [1 if side is None else size // side for side, size in zip(sides, shape, strict=True)]
    codes = torch.randint(0, 16, shape, generator=generator)
    scales = torch.rand(groups, generator=generator) + 0.5
    tensors: dict[Role, Tensor] = {"weight": pack(codes, packing), "scales": scales}
    roles, zeros = list(ROLES), None
    kind = draw(st.sampled_from(["none", "implied", "stored", "packed"]))
    zero_codes = torch.zeros(groups, dtype=torch.int64)
    if kind == "implied":
        zeros, zero_codes = ZeroPoints(implied=8.0), zero_codes + 8
    elif kind != "none":
        zero_codes = torch.randint(0, 16, groups, generator=generator)
        zeros = ZeroPoints(packing=packing if kind == "packed" else None)
        tensors["zeros"] = pack(zero_codes, packing) if kind == "packed" else zero_codes
        roles.append(("zeros", "weight_zero_point"))
    second = draw(st.sampled_from(["none", "multiplies", "divides"]))
    if second != "none":
        tensors["second_scale"] = torch.tensor([4.0])
        roles.append(("second_scale", "weight_global_scale"))
    index = torch.arange(shape[1]) // (sides[1] or shape[1])
    if sides[1] is not None and draw(st.booleans()):
        index = index[torch.randperm(shape[1], generator=generator)]
        tensors["group_index"] = index.int()
        roles.append(("group_index", "weight_g_idx"))
    scheme = Scheme(
        element,
        packing=packing,
        scales=grid,
        zeros=zeros,
        second_scale=second,  # type: ignore[arg-type]  # hypothesis forgets literals
        roles=tuple(roles),
    )
    factor = {"none": 1.0, "multiplies": 4.0, "divides": 0.25}[second]
    decode: Any = VALUES[element]
    values = torch.zeros(shape)
    for row in range(shape[0]):
        for column in range(shape[1]):
            group = (0 if sides[0] is None else row // sides[0], int(index[column]))
            zero = 8 if kind == "implied" else decode(int(zero_codes[group])) if zeros is not None else 0
            values[row, column] = (decode(int(codes[row, column])) - zero) * float(scales[group]) * factor
    return Case(StoredMatrix(scheme, shape, tensors), values)


@settings(max_examples=60)
@given(cases(), st.data())
def test_any_layout_decodes_to_its_values_whole_and_cut(case: Case, data: st.DataObject) -> None:
    matrix, values = case.matrix, case.values
    torch.testing.assert_close(matrix.tensor(), values, rtol=1e-6, atol=1e-6)
    for role, tensor in matrix.tensors.items():
        assert math.prod(stored_shape(matrix.scheme, role, matrix.shape)) == tensor.numel(), role
    assert packed_shape(matrix.scheme, tuple(matrix.tensors["weight"].shape)) == matrix.shape
    for axis in (0, 1):
        start = data.draw(st.integers(0, matrix.shape[axis] - 1))
        size = data.draw(st.integers(1, matrix.shape[axis] - start))
        part = part_of(matrix, axis, start, size)
        assert scheme_of(part) == part_scheme(matrix.scheme, axis, start, size, matrix.shape[axis])
        torch.testing.assert_close(as_tensor(part), values.narrow(axis, start, size), rtol=1e-6, atol=1e-6)


def test_scales_of_whole_rows_may_have_one_dimension() -> None:
    weight, scales = torch.randn(6, 4).to(torch.float8_e4m3fn), torch.rand(6)
    scheme = Scheme(
        "E4M3",
        scales=ScaleGrid(1, None, torch.float32),
        activations="per_token",
        roles=(("weight", "weight"), ("scales", "weight_scale")),
    )
    matrix = StoredMatrix(scheme, (6, 4), {"weight": weight, "scales": scales})
    assert torch.equal(matrix.tensor(), weight.float() * scales[:, None])
    assert torch.equal(as_tensor(matrix.part(0, 2, 3)), matrix.tensor()[2:5])
    assert torch.equal(as_tensor(matrix.part(1, 1, 3)), matrix.tensor()[:, 1:])


def blocks_of(rows: int, columns: int) -> tuple[StoredMatrix, Tensor]:
    """A made-up type: four values of a block are its two bytes and their negatives."""
    generator = torch.Generator().manual_seed(rows * columns)
    data = torch.randint(0, 100, (rows, columns // 2), dtype=torch.uint8, generator=generator)

    def decode(data: Tensor) -> Tensor:
        pairs = data.float().unflatten(1, (-1, 2))
        return torch.cat((pairs, -pairs), dim=-1).flatten(1)

    return StoredMatrix(
        Scheme("X4", Block(4, 2, decode, F32, lambda data: {"weight": decode(data)})),
        (rows, columns),
        {"weight": data},
    ), decode(data)


@given(st.data())
def test_any_part_of_blocks_has_the_values_of_that_part(data: st.DataObject) -> None:
    blocks, values = blocks_of(data.draw(st.integers(1, 6)), 4 * data.draw(st.integers(1, 5)))
    row, column = (data.draw(st.integers(0, size - 1)) for size in values.shape)
    rows = data.draw(st.integers(1, values.shape[0] - row))
    columns = data.draw(st.integers(1, values.shape[1] - column))
    part = part_of(part_of(blocks, 0, row, rows), 1, column, columns)
    assert isinstance(part, StoredMatrix) == (column % 4 == 0 and columns % 4 == 0)
    assert torch.equal(as_tensor(part), values[row : row + rows, column : column + columns])


@pytest.mark.parametrize(
    "fields",
    [
        {"scales": ScaleGrid(1, 32, torch.float16)},
        {"zeros": ZeroPoints()},
        {"second_scale": "divides"},
        {"activations": "static"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_is_stored_has_a_role(fields: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        Scheme("INT8", **fields)


def test_plain_numbers_are_named_as_checkpoints_name_them() -> None:
    names = [float_scheme(dtype).element for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)]
    assert names == ["F32", "BF16", "F16", "FLOAT64"]
    assert all(float_scheme(dtype).is_float for dtype in (torch.float32, torch.float64))
    assert not float_scheme(torch.int8).is_float
    assert part_scheme(float_scheme(torch.bfloat16), 1, 3, 5, 9) == float_scheme(torch.bfloat16)
    assert part_scheme(blocks_of(2, 8)[0].scheme, 1, 2, 4, 8) == F32
