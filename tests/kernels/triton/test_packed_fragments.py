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
    ("kind", "group", "k", "rows", "warps", "pieces"),
    [
        ("e2m1", 32, 448, 1, 2, 4),
        ("e2m1", 32, 448, 8, 4, 1),
        ("zeros", 128, 384, 3, 1, 2),
        ("implied", 128, 384, 1, 4, 1),
        ("zeros", 384, 384, 8, 2, 2),
    ],
)
def test_few_rows(kind: str, group: int, k: int, rows: int, warps: int, pieces: int) -> None:
    from quire.kernels.triton.packed_fragments import fragments_fit, packed_fragments

    torch.manual_seed(0)
    weight, dense = make_packed(1, 40, k, group, kind)
    x, bias = torch.randn(rows, k).bfloat16(), torch.randn(1, 40)
    assert fragments_fit(x.to(DEVICE), weight)
    expected = x.float() @ dense[0].T + bias
    cut = {"warps": warps, "pieces": pieces}
    close(packed_fragments(x.to(DEVICE), None, weight, bias.to(DEVICE), **cut), expected, 1e-2)
    gate, up = expected.bfloat16().float().chunk(2, -1)
    out = packed_fragments(x.to(DEVICE), None, weight, bias.to(DEVICE), "silu", **cut)
    close(out, torch.nn.functional.silu(gate) * up, 2e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("kind", "pieces"), [("zeros", 2), ("zeros", 4), ("implied", 4)])
def test_scales_of_several_pieces_are_read_at_once(kind: str, pieces: int, dtype: torch.dtype) -> None:
    from quire.kernels.triton.packed_fragments import packed_fragments

    torch.manual_seed(0)
    k = 128 * pieces * 3  # in the second iteration the second warp has none
    weight, dense = make_packed(1, 40, k, 128, kind)
    exact = weight.scales.cpu()
    weight = weight._replace(scales=weight.scales.to(dtype))
    dense *= (weight.scales.cpu().float() / exact).repeat_interleave(128, -1)
    x = torch.randn(2, k).bfloat16()
    close(packed_fragments(x.to(DEVICE), None, weight, None, warps=2, pieces=pieces), x.float() @ dense[0].T, 1e-2)


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
    close(packed_fragments(*given, per_row=2, warps=1, pieces=2), expected, 2e-2)
    out = packed_fragments(*given, weights=shares.to(DEVICE), per_row=2, warps=1, pieces=2)
    close(out, (expected.view(1, 2, -1) * shares[:, :, None]).transpose(0, 1), 2e-2)
