"""Packed weights times few tokens by matrix instructions on registers, against the weights that these stand for.

Here the interpreter checks which thread reads what, and one of PTX what the instructions do. That the bits are those
of many rows is tested on a GPU, by tests/gpu/test_packed_fragments.py.
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


@pytest.mark.parametrize(
    ("kind", "group", "k"), [("e2m1", 32, 960), ("zeros", 128, 1408), ("e4m3", 128, 1280), ("int8", 64, 960)]
)
@pytest.mark.parametrize("splits", [1, 4, None])
def test_sums_that_need_no_rounding_are_exact(kind: str, group: int, k: int, splits: int | None) -> None:
    """Not one column is left out, read twice or scaled by another group's number, however the sum is split."""
    from quire.kernels.triton.packed_fragments import packed_fragments

    torch.manual_seed(0)
    weight, _ = make(1, 72, k, group, kind)
    if kind == "e4m3":
        weight = weight._replace(codes=weight.codes.float().round().to(weight.codes.dtype))
    if kind != "e2m1":
        weight = weight._replace(scales=weight.scales.log2().round().exp2())  # powers of two
    x = torch.randint(-2, 3, (8, k)).bfloat16()
    expected = (x.double() @ weight.unpacked().double().cpu()[0].T).float()
    if not NATIVE:  # the interpreter leaves out bits instead of rounding
        expected = (expected.view(torch.int32) & -65536).view(torch.float32)
    found = packed_fragments(x.to(DEVICE), None, weight, None, splits=splits)
    assert torch.equal(found.cpu(), expected.bfloat16())


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
