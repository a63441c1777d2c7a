"""Codes of 2 to 8 bits in words of 32, which some straddle: odd shapes decode to their values, whole and cut."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.layers.scheme import (
    Role,
    ScaleGrid,
    Scheme,
    StoredMatrix,
    ZeroPoints,
    as_tensor,
    in_words,
    part_of,
    rows_of,
)
from quire.loader.quantized.base import stored_shape

BITS = (2, 3, 4, 5, 6, 7, 8)


def words(codes: Tensor, bits: int, axis: int) -> Tensor:
    """Each line one long number; lines end with a whole word, or where no code straddles words with a full one."""
    lines = (codes if axis == 1 else codes.t()).tolist()
    each = 32 // bits
    count = -(-len(lines[0]) * bits // 32) if 32 % bits else -(-len(lines[0]) // each)
    numbers = [sum(code << index * bits for index, code in enumerate(line)) for line in lines]
    found = torch.tensor([[number >> 32 * word & 0xFFFFFFFF for word in range(count)] for number in numbers])
    found = (found - ((found >> 31) << 32)).to(torch.int32)
    return found if axis == 1 else found.t()


@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_odd_shapes_whole_and_as_ranks_cut_them(bits: int, data: st.DataObject) -> None:
    axis, zero_axis = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 1))
    shape = data.draw(st.tuples(st.integers(1, 70), st.integers(1, 70)))
    sides = (data.draw(st.sampled_from([None, 1, 4])), data.draw(st.sampled_from([None, 1, 3, 8, 16, 32])))
    groups = [1 if side is None else -(-size // side) for side, size in zip(sides, shape, strict=True)]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 31)))
    codes = torch.randint(0, 1 << bits, shape, generator=generator)
    scales = torch.rand(groups, generator=generator) + 0.5
    tensors: dict[Role, Tensor] = {"weight": words(codes, bits, axis), "scales": scales}
    roles: tuple[tuple[Role, str], ...] = (("weight", "w"), ("scales", "s"))
    zero_codes, zeros = torch.full(groups, 1 << bits - 1), ZeroPoints(implied=float(1 << bits - 1))
    if data.draw(st.booleans()):
        zero_codes = torch.randint(0, 1 << bits, groups, generator=generator)
        zeros, roles = ZeroPoints(packing=in_words(bits, zero_axis)), (*roles, ("zeros", "z"))
        tensors["zeros"] = words(zero_codes, bits, zero_axis)
    scheme = Scheme(
        f"UINT{bits}",
        packing=in_words(bits, axis),
        scales=ScaleGrid(*sides, torch.float32),
        zeros=zeros,
        roles=roles,
    )
    of = [torch.arange(size) // (side or size) for side, size in zip(sides, shape, strict=True)]
    values = (codes - zero_codes[of[0]][:, of[1]]) * scales[of[0]][:, of[1]]
    matrix = StoredMatrix(scheme, shape, tensors)
    for role, tensor in tensors.items():
        assert math.prod(stored_shape(scheme, role, shape)) == tensor.numel(), role
    torch.testing.assert_close(matrix.tensor(), values)
    for cut in (0, 1):
        unit = data.draw(st.sampled_from([1, 8, 32]))
        places = sorted({0, *(place for place in range(unit, shape[cut], unit)), shape[cut]})
        for start, end in pairwise(places[:4]):
            part = part_of(matrix, cut, start, end - start)
            torch.testing.assert_close(as_tensor(part), values.narrow(cut, start, end - start))
            again = part_of(part, 1 - cut, 0, (shape[1 - cut] + 1) // 2)
            expected = values.narrow(cut, start, end - start).narrow(1 - cut, 0, (shape[1 - cut] + 1) // 2)
            torch.testing.assert_close(as_tensor(again), expected)
    picked = torch.randperm(shape[0], generator=generator)[: 1 + shape[0] // 2]
    torch.testing.assert_close(as_tensor(rows_of(matrix, picked)), values[picked])
