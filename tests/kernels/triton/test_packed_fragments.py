"""Packed weights times few tokens by matrix instructions on registers, against the weights that these stand for.

Here the interpreter checks which thread reads what; the instructions themselves run on a GPU only.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels.packed import PackedWeight, pack_codes
from tests.kernels.device import DEVICE, NATIVE
from tests.kernels.triton.paged import needs_triton
from tests.kernels.triton.ptx import floats, run
from tests.kernels.triton.test_packed_matmul import make_bytes, make_packed

pytestmark = needs_triton


def close(found: Tensor, expected: Tensor, rounding: float) -> None:
    assert found.dtype in (torch.bfloat16, torch.float32)
    assert float((found.float().cpu() - expected).abs().max()) <= rounding * float(expected.abs().max())


def make(experts: int, n: int, k: int, group: int, kind: str) -> tuple[PackedWeight, Tensor]:
    if kind in ("int8", "e4m3"):
        weight = make_bytes(experts, n, k, kind, group=group)
        return weight, weight.unpacked().cpu()
    return make_packed(experts, n, k, group, kind)


@pytest.mark.parametrize(
    ("kind", "group", "k", "rows", "splits", "columns", "ahead"),
    [
        ("e2m1", 32, 448, 1, 1, 64, 4),
        ("e2m1", 32, 448, 8, 2, 64, 2),
        ("zeros", 128, 640, 3, 4, 128, 2),
        ("implied", 128, 384, 1, 1, 64, 4),
        ("implied", 64, 1024, 2, 8, 128, 2),
        ("zeros", 384, 384, 8, 2, 128, 4),
        ("zeros", 128, 1024, 2, 2, 128, 4),  # whole splits
        ("implied", 1024, 1024, 1, 2, 128, 4),
        ("e2m1", 32, 960, 1, 1, 64, 5),
        ("e4m3", 128, 640, 3, 2, 128, 2),
        ("e4m3", 128, 1024, 1, 2, 128, 4),
        ("int8", 64, 448, 8, 1, 128, 3),
    ],
)
def test_few_rows(kind: str, group: int, k: int, rows: int, splits: int, columns: int, ahead: int) -> None:
    from quire.kernels.triton.packed_fragments import fragments_fit, packed_fragments

    torch.manual_seed(0)
    weight, dense = make(1, 72, k, group, kind)
    x, bias = torch.randn(rows, k).bfloat16(), torch.randn(1, 72)
    assert fragments_fit(x.to(DEVICE), weight)
    expected = x.float() @ dense[0].T + bias
    how = {"splits": splits, "columns": columns, "ahead": ahead}
    close(packed_fragments(x.to(DEVICE), None, weight, bias.to(DEVICE), **how), expected, 1e-2)
    gate, up = expected.bfloat16().float().chunk(2, -1)
    out = packed_fragments(x.to(DEVICE), None, weight, bias.to(DEVICE), "silu", **how)
    close(out, torch.nn.functional.silu(gate) * up, 2e-2)


def test_slots_of_experts() -> None:
    from quire.kernels.triton.packed_fragments import packed_fragments
    from quire.ops.grouped import grouped_gate_up

    torch.manual_seed(0)
    weight, dense = make_packed(4, 48, 192, 32, "e2m1", 1)
    x = torch.randn(1, 192).bfloat16()
    ids = torch.tensor([[3, 1]], dtype=torch.int32)
    expected = grouped_gate_up(x.float(), ids, dense, None, "clamped_swiglu").flatten(0, 1)
    shares = torch.rand(1, 2)
    given = x.to(DEVICE), ids.to(DEVICE), weight, None, "clamped_swiglu"
    close(packed_fragments(*given, per_row=2), expected, 2e-2)
    out = packed_fragments(*given, weights=shares.to(DEVICE), per_row=2)
    close(out, (expected.view(1, 2, -1) * shares[:, :, None]).transpose(0, 1), 2e-2)


@pytest.mark.parametrize("kind", ["int4", "e2m1", "int8", "e4m3"])
def test_the_assembly_multiplies_a_chunk(kind: str) -> None:
    """By an interpreter of PTX, for the threads of a warp: 16 lines of 64 columns by 8 tokens, added to sums."""
    from quire.kernels.triton.packed_fragments import _assembly

    draw = np.random.default_rng(0)
    lane, i = np.arange(32)[:, None], np.arange(2)[None, :]
    line, quarter = lane // 4, lane % 4
    x = torch.from_numpy(draw.standard_normal((8, 64)).astype(np.float32)).bfloat16()
    pairs = x.view(torch.int16).numpy().view(np.uint32)  # [8 tokens, 32]
    given = {8 + 2 * piece: pairs[line, 8 * piece + 2 * quarter + i] for piece in range(4)}
    sums = draw.standard_normal((16, 8)).astype(np.float32)
    given |= {20: sums.view(np.uint32)[line, 2 * quarter + i], 22: sums.view(np.uint32)[line + 8, 2 * quarter + i]}
    if kind in ("int8", "e4m3"):
        codes = draw.integers(0, 120, (16, 64), dtype=np.uint8) | draw.integers(0, 2, (16, 64), dtype=np.uint8) << 7
        words = codes.view(np.uint32)  # [16, 16]
        values = torch.from_numpy(codes).view(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
        for half in range(2):  # lines of the first and of the second eight
            given[4 + 2 * half] = words[line + 8 * half, quarter + 4 * i]
            given[16 + 2 * half] = words[line + 8 * half, quarter + 4 * i + 8]
    else:
        codes = draw.integers(0, 16, (16, 64), dtype=np.uint8)
        values = torch.from_numpy(codes.astype(np.float32)) - 8
        if kind == "e2m1":
            magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
            values = magnitudes[torch.from_numpy(codes & 7).long()] * torch.from_numpy(1 - 2.0 * (codes >> 3))
        packed = pack_codes(torch.from_numpy(codes)).numpy().view(np.uint32)  # [16, 8]
        for half in range(2):
            given[4 + 2 * half] = packed[line + 8 * half, 2 * quarter + i]
            number = 0x43084308 if kind == "int4" else 0x7E807E80  # 128 and 8; 2 ** 126
            given[16 + 2 * half] = np.full((32, 2), number)
    operands = {f"${first + place}": pair[:, place] for first, pair in given.items() for place in range(2)}
    found = [floats(register) for register in run(_assembly(kind), operands, 4)]
    expected = torch.from_numpy(sums) + values.float() @ x.float().T
    at_line, token = lane[:, 0] // 4, 2 * (lane[:, 0] % 4)
    for place, part in enumerate(found):
        wanted = expected[at_line + 8 * (place // 2), token + place % 2]
        torch.testing.assert_close(part, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not NATIVE, reason="numpy's sums are not a GPU's, whose tensor cores both kernels use")
@pytest.mark.parametrize(
    ("kind", "group", "n", "k", "splits", "columns"),
    [
        ("e2m1", 32, 5760, 2880, 1, 64),
        ("e2m1", 32, 2880, 2880, 2, 64),
        ("zeros", 128, 6144, 4096, 4, 128),
        ("implied", 64, 4096, 4096, 8, 128),
        ("zeros", 128, 1536, 2048, 1, 64),
        ("e4m3", 128, 5120, 2048, 4, 128),
        ("e4m3", 128, 1536, 2048, 1, 128),
        ("int8", 64, 2048, 4096, 8, 128),
    ],
)
@pytest.mark.parametrize("activation", ["", "silu"])
def test_the_bits_are_those_of_many_rows(
    kind: str, group: int, n: int, k: int, splits: int, columns: int, activation: str
) -> None:
    from quire.kernels.triton.grouped_matmul import GroupedShape
    from quire.kernels.triton.packed_fragments import fragments_fit, packed_fragments
    from quire.kernels.triton.packed_matmul import packed_tiles
    from quire.kernels.triton.packed_wide import packed_wide, wide_fits

    torch.manual_seed(0)
    weight, _ = make(1, n, k, group, kind)
    x, bias = torch.randn(8, k).bfloat16().to(DEVICE), torch.randn(1, n).to(DEVICE)
    assert weight.has_bytes or wide_fits(x, weight)
    assert fragments_fit(x, weight)
    shape = GroupedShape(16, 64, columns, 4, 4)
    if weight.has_bytes:
        many = packed_tiles(x, None, weight, bias, 1, shape, activation, splits=splits)
    else:
        many = packed_wide(x, None, weight, bias, shape, activation, splits=splits)
    for rows in (1, 8):
        few = packed_fragments(x[:rows], None, weight, bias, activation, splits=splits, columns=columns)
        assert torch.equal(few, many[:rows])
