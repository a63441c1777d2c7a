"""Matmuls with 4-bit weights against the same matmuls with the weights that these stand for."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tests.kernels.device import DEVICE, HALF
from tests.kernels.triton.paged import needs_triton

pytestmark = needs_triton


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def make_packed(experts: int, n: int, k: int, group: int, kind: str, seed: int = 0) -> tuple[Any, Tensor]:
    """A packed weight, and [experts, n, k] in float32."""
    from quire.kernels.packed import PackedWeight, pack_codes

    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (experts, n, k), generator=generator)
    shape = (experts, n, k // group)
    zeros = None
    if kind == "e2m1":
        scales = torch.randint(124, 129, shape, generator=generator).to(torch.uint8)
        values = torch.where(codes < 8, E2M1[codes & 7], -E2M1[codes & 7])
        factors = torch.ldexp(torch.ones(shape), scales.int() - 127)
    else:
        scales = factors = torch.rand(shape, generator=generator) + 0.5
        offset = torch.full(shape, 8.0)
        if kind == "zeros":
            zeros = torch.randint(0, 16, shape, generator=generator).to(torch.uint8)
            offset = zeros.float()
        values = codes - offset.repeat_interleave(group, -1)
    dense = values * factors.repeat_interleave(group, -1)
    on_device = PackedWeight(
        pack_codes(codes).to(DEVICE), scales.to(DEVICE), None if zeros is None else zeros.to(DEVICE), kind == "e2m1"
    )
    return on_device, dense


@pytest.mark.parametrize(
    ("group", "kind"), [(32, "e2m1"), (128, "zeros"), (64, "implied"), (32, "zeros"), (384, "implied")]
)
def test_one_matrix(group: int, kind: str) -> None:
    from quire.kernels.triton.grouped_matmul import GroupedShape
    from quire.kernels.triton.packed_matmul import packed_tiles

    k = 384 if group == 384 else 256
    weight, dense = make_packed(1, 40, k, group, kind)
    x, bias = torch.randn(3, k), torch.randn(1, 40)
    expected = x @ dense[0].T + bias
    for splits in (1, 2):
        shape = GroupedShape(bn=32, num_stages=2)
        out = packed_tiles(x.to(DEVICE), None, weight, bias.to(DEVICE), 1, shape, splits=splits)
        torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("k", [128, 192])
def test_experts(k: int) -> None:
    from quire.kernels.triton.expert_slots import sort_slots
    from quire.kernels.triton.grouped_matmul import GroupedShape
    from quire.kernels.triton.packed_matmul import packed_tiles
    from quire.ops.grouped import grouped_gate_up

    weight, dense = make_packed(4, 48, k, 32, "e2m1", 1)
    x = torch.randn(3, k)
    ids = torch.tensor([[0, 2], [2, 1], [3, 2]], dtype=torch.int32)
    expected = grouped_gate_up(x, ids, dense, None, "clamped_swiglu").flatten(0, 1)
    slots = sort_slots(ids.to(DEVICE), 4, 16)
    shape = GroupedShape(bn=32, num_stages=2)
    out = packed_tiles(x.to(DEVICE), slots, weight, None, 2, shape, "clamped_swiglu")
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-3)


ROUNDING = 1e-3 if torch.float16 == HALF else 1e-2  # of a result, beside the largest


def close(found: Tensor, expected: Tensor) -> None:
    assert float((found.float().cpu() - expected).abs().max()) <= ROUNDING * float(expected.abs().max())


@pytest.mark.parametrize(
    ("group", "kind"), [(32, "e2m1"), (128, "zeros"), (64, "implied"), (32, "zeros"), (384, "implied")]
)
def test_one_row_without_matrix_instructions(group: int, kind: str) -> None:
    from quire.kernels.triton.packed_rows import packed_rows

    k = 384
    weight, dense = make_packed(1, 40, k, group, kind)
    x, bias = torch.randn(2, k).to(HALF), torch.randn(1, 40)
    expected = x.float() @ dense[0].T + bias
    for splits in (1, 2):
        out = packed_rows(x.to(DEVICE), None, weight, bias.to(DEVICE), splits=splits)
        close(out, expected)


def test_experts_of_one_row() -> None:
    from quire.kernels.triton.packed_rows import packed_rows
    from quire.ops.grouped import grouped_gate_up

    weight, dense = make_packed(4, 48, 192, 32, "e2m1", 1)
    x = torch.randn(2, 192).to(HALF)
    ids = torch.tensor([[0, 2], [3, 1]], dtype=torch.int32)
    expected = grouped_gate_up(x.float(), ids, dense, None, "clamped_swiglu").flatten(0, 1)
    out = packed_rows(x.to(DEVICE), ids.to(DEVICE), weight, None, "clamped_swiglu", per_row=2)
    close(out, expected)


@pytest.mark.parametrize(("group", "kind"), [(32, "e2m1"), (128, "zeros"), (128, "implied")])
def test_tiles_copied_by_the_tensor_memory_unit(group: int, kind: str) -> None:
    from quire.kernels.triton.grouped_matmul import GroupedShape
    from quire.kernels.triton.packed_wide import packed_wide

    k = 192 if group == 32 else 256
    weight, dense = make_packed(1, 144, k, group, kind)
    x, bias = torch.randn(19, k).to(HALF) / 16, torch.randn(1, 144)
    expected = x.float() @ dense[0].T + bias
    given = x.to(DEVICE), None, weight, bias.to(DEVICE), GroupedShape(16, 128, 64, 4, 2)
    for splits, in_sums in product((1, 2), (True, False)):
        close(packed_wide(*given, splits=splits, in_sums=in_sums), expected)
    gate, up = expected.to(HALF).float().chunk(2, -1)
    for splits, in_sums in product((1, 2), (True, False)):
        out = packed_wide(*given, "silu", splits=splits, in_sums=in_sums)
        close(out, torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("k", [256, 384, 768])
def test_pieces_that_are_multiplied_in_turn(k: int) -> None:
    """With 384 columns the last piece has no other: then there is one sum."""
    from quire.kernels.triton.grouped_matmul import GroupedShape
    from quire.kernels.triton.packed_wide import packed_wide

    weight, dense = make_packed(1, 144, k, 128, "zeros")
    x = torch.randn(40, k).to(HALF) / 16
    for splits in (1, 2):
        shape = GroupedShape(16, 128, 128, 4, 2)
        out = packed_wide(x.to(DEVICE), None, weight, None, shape, splits=splits, in_sums=False, paired=True)
        close(out, x.float() @ dense[0].T)


def test_sorted_experts_copied_by_the_tensor_memory_unit() -> None:
    from quire.kernels.triton.expert_slots import sort_slots
    from quire.kernels.triton.grouped_matmul import GroupedShape
    from quire.kernels.triton.packed_wide import packed_wide
    from quire.ops.grouped import grouped_gate_up

    weight, dense = make_packed(4, 144, 192, 32, "e2m1", 1)
    x = torch.randn(3, 192).to(HALF)
    ids = torch.tensor([[0, 2], [2, 1], [3, 2]], dtype=torch.int32)
    expected = grouped_gate_up(x.float(), ids, dense, None, "clamped_swiglu").flatten(0, 1)
    slots = sort_slots(ids.to(DEVICE), 4, 16)
    order = slots.order.cpu().long()
    shape = GroupedShape(16, 128, 128, 4, 2)
    lines = x[order // 2].to(DEVICE)
    close(packed_wide(lines, slots, weight, None, shape, "clamped_swiglu"), expected[order])
    close(packed_wide(lines, slots, weight, None, shape, "clamped_swiglu", scatter=True), expected)
    shares = torch.rand(3, 2)
    out = packed_wide(lines, slots, weight, None, shape, "clamped_swiglu", weights=shares.to(DEVICE))
    close(out, (expected.view(3, 2, -1) * shares[:, :, None]).transpose(0, 1))


def make_bytes(experts: int, n: int, k: int, kind: str, group: int = 0) -> Any:
    """Codes of 8 bits; "minima" and "line_scale" (NVFP4) have 4."""
    from quire.kernels.packed import E4M3, PackedWeight, pack_codes

    generator = torch.Generator().manual_seed(k)
    values = torch.randn(experts, n, k, generator=generator)
    small = pack_codes(torch.randint(0, 16, (experts, n, k), generator=generator))
    group = group or {"minima": 32, "line_scale": 16}.get(kind, 64)
    scales = torch.rand(experts, n, k // group, generator=generator) + 0.5
    lines = torch.rand(experts, n, generator=generator) + 0.5
    exponents = torch.randint(124, 129, scales.shape, generator=generator).to(torch.uint8)
    made = {
        "int8": PackedWeight((values * 40).to(torch.int8), scales / 40),
        "e4m3": PackedWeight(values.to(E4M3), scales),
        "exponents": PackedWeight(values.to(E4M3), exponents),
        "minima": PackedWeight(small, scales, minima=-8 * scales),
        "line_scale": PackedWeight(small, scales.to(E4M3), is_float=True, line_scale=lines),
    }[kind]
    return tree_map(lambda part: part.to(DEVICE) if isinstance(part, Tensor) else part, made)


@pytest.mark.parametrize("kind", ["int8", "e4m3", "exponents"])
@pytest.mark.parametrize("num_experts", [1, 4])
def test_bytes_copied_by_the_tensor_memory_unit(kind: str, num_experts: int) -> None:
    from quire.kernels.triton.expert_slots import sort_slots
    from quire.kernels.triton.grouped_matmul import GroupedShape
    from quire.kernels.triton.packed_wide import packed_wide
    from quire.ops.grouped import grouped_gate_up

    weight = make_bytes(num_experts, 144, 384, kind, group=128)
    dense = weight.unpacked().cpu()
    x = torch.randn(19, 384).to(HALF) / 16
    ids = torch.rand(19, num_experts).argsort(-1)[:, :2].to(torch.int32)
    shape = GroupedShape(16, 64, 128, 2, 2)
    if num_experts == 1:
        for splits in (1, 2):
            out = packed_wide(x.to(DEVICE), None, weight, None, shape, splits=splits)
            close(out, x.float() @ dense[0].T)
        return
    expected = grouped_gate_up(x.float(), ids, dense, None, "silu").flatten(0, 1)
    slots = sort_slots(ids.to(DEVICE), num_experts, 16)
    sorted_rows = x[slots.order.cpu().long() // 2].to(DEVICE)
    close(packed_wide(sorted_rows, slots, weight, None, shape, "silu", scatter=True), expected)


@pytest.mark.parametrize("kind", ["e4m3", "exponents"])
@pytest.mark.parametrize("num_experts", [1, 4])
def test_lines_that_have_the_same_scales(kind: str, num_experts: int) -> None:
    """As in 128x128 blocks: kernels that are told read a scale once for many lines."""
    from quire.kernels.triton.expert_slots import sort_slots
    from quire.kernels.triton.grouped_matmul import GroupedShape
    from quire.kernels.triton.packed_rows import packed_rows
    from quire.kernels.triton.packed_wide import packed_wide
    from quire.ops.grouped import grouped_gate_up

    weight = make_bytes(num_experts, 256, 512, kind, group=128)
    scales = weight.scales[:, ::64].repeat_interleave(64, 1).contiguous()
    weight = weight._replace(scales=scales, rows_per_scale=64)
    dense, x = weight.unpacked().cpu(), torch.randn(19, 512).to(HALF) / 16
    if num_experts == 1:
        shape = GroupedShape(16, 64, 128, 2, 2)
        for splits in (1, 2):
            close(packed_wide(x.to(DEVICE), None, weight, None, shape, splits=splits), x.float() @ dense[0].T)
        for lines in (8, 32):
            close(packed_rows(x[:1].to(DEVICE), None, weight, None, lines=lines), x[:1].float() @ dense[0].T)
        return
    ids = torch.rand(19, num_experts).argsort(-1)[:, :2].to(torch.int32)
    expected = grouped_gate_up(x.float(), ids, dense, None, "silu").flatten(0, 1)
    slots = sort_slots(ids.to(DEVICE), num_experts, 16)
    sorted_rows = x[slots.order.cpu().long() // 2].to(DEVICE)
    for lines in (32, 64):
        shape = GroupedShape(16, lines, 128, 2, 2)
        close(packed_wide(sorted_rows, slots, weight, None, shape, "silu", scatter=True), expected)
    out = packed_rows(x[:1].to(DEVICE), ids[:1].to(DEVICE), weight, None, "silu", per_row=2, lines=32)
    close(out, expected[:2])


@pytest.mark.parametrize(
    ("kind", "group"),
    [("e2m1", 32), ("zeros", 64), ("zeros", 128), ("int8", 64), ("e4m3", 64), ("minima", 64), ("line_scale", 64)],
)
def test_a_row_has_the_same_bits_alone_and_among_others(kind: str, group: int) -> None:
    from quire.kernels.triton.packed_mlp import packed_linear_fixed, packed_sparse_mlp_fixed

    generator = torch.Generator().manual_seed(0)
    gate_up, down = (
        make_packed(4, n, k, group, kind)[0] if kind in ("e2m1", "zeros") else make_bytes(4, n, k, kind)
        for n, k in ((2 * max(group, 64), 128), (64, max(group, 64)))
    )
    single = type(gate_up)(*(part[:1] if isinstance(part, Tensor) else part for part in gate_up))
    x = torch.randn(70, 128, generator=generator).to(DEVICE, HALF) / 16
    ids = torch.rand(70, 4, generator=generator).argsort(-1)[:, :2].to(DEVICE, torch.int32)
    shares = torch.rand(70, 2, generator=generator).to(DEVICE)
    many = packed_linear_fixed(x, single, None, "silu")
    for rows in (1, 8, 17):
        assert torch.equal(packed_linear_fixed(x[-rows:], single, None, "silu"), many[-rows:])
    many = packed_sparse_mlp_fixed(x, ids, shares, gate_up, None, down, None, "silu", False)[0]
    for rows in (1, 10):
        few = packed_sparse_mlp_fixed(
            x[-rows:], ids[-rows:], shares[-rows:], gate_up, None, down, None, "silu", False
        )[0]
        assert torch.equal(few, many[-rows:])


def test_experts_with_many_slots_are_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.kernels.triton import packed_mlp
    from quire.ops.grouped import sparse_mlp

    gate_up, dense_gate_up = make_packed(4, 128, 128, 32, "e2m1")
    down, dense_down = make_packed(4, 128, 64, 64, "zeros")
    x, ids = torch.randn(5, 128).to(HALF) / 64, torch.rand(5, 4).argsort(-1)[:, :2].to(torch.int32)
    given = x.to(DEVICE), ids.to(DEVICE), (shares := torch.rand(5, 2)).to(DEVICE), gate_up, None, down, None
    monkeypatch.setattr(packed_mlp, "packed_tiles", None)
    monkeypatch.setattr(packed_mlp, "packed_wide", None)
    monkeypatch.setattr(packed_mlp, "MANY_SLOTS", 2)
    found = packed_mlp.packed_sparse_mlp(*given, "silu", False)[0]
    expected = sparse_mlp(x.float(), ids, shares, dense_gate_up, None, dense_down, None, "silu", False)[0]
    close(found, expected)


@pytest.mark.parametrize("seed", range(8))
def test_every_kind_of_codes(seed: int) -> None:
    """4 and 8 bits, scales for 16 columns and more, minima, and a scale for each line."""
    from quire.kernels.triton.packed_matmul import unpack
    from quire.kernels.triton.packed_mlp import packed_linear_fixed, packed_sparse_mlp
    from quire.ops import grouped
    from quire.ops.split_k import sum_of
    from tests.ops.inputs.packed import generate_linear_inputs, generate_packed_sparse_inputs

    def place(value: Any) -> Any:
        return tree_map(lambda part: part.to(DEVICE) if isinstance(part, Tensor) else part, value)

    given = generate_linear_inputs(seed)
    out = packed_linear_fixed(*map(place, given))
    torch.testing.assert_close(out.cpu(), grouped.packed_linear(*given), rtol=1e-4, atol=1e-4)
    assert torch.equal(unpack(place(given[1]), torch.float32).cpu(), given[1].unpacked()[0])
    experts = generate_packed_sparse_inputs(seed)
    found = sum_of(packed_sparse_mlp(*map(place, experts)), torch.float32).cpu()
    torch.testing.assert_close(found, grouped.packed_sparse_mlp(*experts)[0], rtol=2e-4, atol=2e-4)


def test_many_rows_of_a_split_sum_are_multiplied_in_turn() -> None:
    """Their partial sums fit into what the ledger has for them."""
    from quire.kernels.packed import FIXED_ROWS, fixed_split_bytes, splits_of
    from quire.kernels.triton.packed_mlp import packed_linear_fixed

    weight, dense = make_packed(1, 64, 256, 128, "zeros")
    splits = splits_of(64, 256)
    assert splits > 1
    assert fixed_split_bytes(64, 256) == splits * FIXED_ROWS * 64 * 4
    assert fixed_split_bytes(1 << 15, 4096) == 0
    x = torch.randn(FIXED_ROWS + 3, 256).to(DEVICE, HALF)
    out = packed_linear_fixed(x, weight, None, "")
    assert torch.equal(out[-5:], packed_linear_fixed(x[-5:], weight, None, ""))
    torch.testing.assert_close(out.float().cpu(), x.float().cpu() @ dense[0].t(), rtol=2e-2, atol=2.0)
