"""Packed weights times few tokens by matrix instructions on registers, against the weights that these stand for.

Here the interpreter checks which thread reads what; the instructions themselves run on a GPU only.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.device import DEVICE
from tests.kernels.triton.paged import needs_triton
from tests.kernels.triton.test_packed_matmul import make_packed

pytestmark = needs_triton


def close(found: Tensor, expected: Tensor, rounding: float) -> None:
    assert found.dtype in (torch.bfloat16, torch.float32)
    assert float((found.float().cpu() - expected).abs().max()) <= rounding * float(expected.abs().max())


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
    ],
)
def test_few_rows(kind: str, group: int, k: int, rows: int, splits: int, columns: int, ahead: int) -> None:
    from quire.kernels.triton.packed_fragments import fragments_fit, packed_fragments

    torch.manual_seed(0)
    weight, dense = make_packed(1, 72, k, group, kind)
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


@pytest.mark.skipif(DEVICE.type != "cuda", reason="matrix instructions run on a GPU only")
@pytest.mark.parametrize(
    ("kind", "group", "n", "k", "splits", "columns"),
    [
        ("e2m1", 32, 5760, 2880, 1, 64),
        ("e2m1", 32, 2880, 2880, 2, 64),
        ("zeros", 128, 6144, 4096, 4, 128),
        ("implied", 64, 4096, 4096, 8, 128),
        ("zeros", 128, 1536, 2048, 1, 64),
    ],
)
@pytest.mark.parametrize("activation", ["", "silu"])
def test_the_bits_are_those_of_copied_tiles(
    kind: str, group: int, n: int, k: int, splits: int, columns: int, activation: str
) -> None:
    from quire.kernels.triton.grouped_matmul import GroupedShape
    from quire.kernels.triton.packed_fragments import fragments_fit, packed_fragments
    from quire.kernels.triton.packed_wide import packed_wide, wide_fits

    torch.manual_seed(0)
    weight, _ = make_packed(1, n, k, group, kind)
    x, bias = torch.randn(8, k).bfloat16().to(DEVICE), torch.randn(1, n).to(DEVICE)
    assert wide_fits(x, weight)
    assert fragments_fit(x, weight)
    shape = GroupedShape(16, 64, columns, 4, 4)
    wide = packed_wide(x, None, weight, bias, shape, activation, splits=splits)
    for rows in (1, 8):
        few = packed_fragments(x[:rows], None, weight, bias, activation, splits=splits, columns=columns)
        assert torch.equal(few, wide[:rows])
