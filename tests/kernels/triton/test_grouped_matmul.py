"""Slots sorted by expert, and the grouped matmuls over them, against the ops' references."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.device import DEVICE, HALF
from tests.kernels.triton.paged import needs_triton

pytestmark = needs_triton


def ids_of(n: int, k: int, experts: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, experts, generator=generator).argsort(-1)[:, :k].to(torch.int32)


@pytest.mark.parametrize(
    ("n", "k", "experts"),
    [(1, 2, 4), (5, 3, 8), (70, 2, 60), (33, 8, 128), (300, 4, 16), (8200, 4, 60), (4096, 8, 128)],
)
@pytest.mark.parametrize("tile", [16, 32])
def test_slots_are_sorted_stably_into_tiles_of_one_expert(n: int, k: int, experts: int, tile: int) -> None:
    from quire.kernels.triton.expert_slots import sort_slots

    ids = ids_of(n, k, experts)
    order, tiles, size = sort_slots(ids.to(DEVICE), experts, tile)
    assert size == tile
    assert order.tolist() == ids.flatten().argsort(stable=True).tolist()
    seen = []
    for expert, begin, end in tiles.t().tolist():
        if expert < 0:
            continue
        assert 0 < end - begin <= tile
        assert set(ids.flatten()[order.cpu()[begin:end].long()].tolist()) == {expert}
        seen += range(begin, end)
    assert sorted(seen) == list(range(n * k))


@pytest.mark.parametrize("n", [300, 8200])
def test_slots_of_no_expert_are_left_out(n: int) -> None:
    from quire.kernels.triton.expert_slots import sort_slots

    ids = ids_of(n, 4, 16)
    ids[ids < 3] = -1
    order, tiles, _ = sort_slots(ids.to(DEVICE), 16, 32)
    kept = int((ids >= 0).sum())
    wanted = ids.flatten().argsort(stable=True)[ids.numel() - kept :]
    assert order[:kept].tolist() == wanted.tolist()
    assert sum(end - begin for expert, begin, end in tiles.t().tolist() if expert >= 0) == kept


def test_few_slots_have_few_tiles() -> None:
    """A program for each tile that could be was most of the time of one token: 128 experts, 8 of them used."""
    from quire.kernels.triton.expert_slots import sort_slots

    for ids in ([[120, 3, 127, 0, 64, 65, 66, 67]], [[5, 5, 5, 5, 5, 5, 5, 5]] * 5, [[127] * 8]):
        slots = torch.tensor(ids, dtype=torch.int32)
        order, tiles, _ = sort_slots(slots.to(DEVICE), 128, 16)
        assert tiles.shape[1] <= slots.numel() + slots.numel() // 16
        found = [(expert, end - begin) for expert, begin, end in tiles.t().tolist() if expert >= 0]
        assert [expert for expert, _ in found] == sorted(expert for expert, _ in found)
        for expert in set(slots.flatten().tolist()):
            assert sum(count for each, count in found if each == expert) == int((slots == expert).sum())
        assert sorted(order.tolist()) == list(range(slots.numel()))


@pytest.mark.parametrize("at_once", [16, 128, 1 << 12])
def test_slots_are_looked_at_in_pieces(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.kernels.triton import expert_slots

    monkeypatch.setattr(expert_slots, "_AT_ONCE", at_once)
    ids = ids_of(100, 4, 12)
    order = expert_slots.sort_slots(ids.to(DEVICE), 12, 16).order
    assert order.tolist() == ids.flatten().argsort(stable=True).tolist()


@pytest.mark.parametrize("seed", [0, 1, 5, 6])
def test_grouped_matmuls(seed: int) -> None:
    from quire.kernels.triton.expert_slots import sort_slots
    from quire.kernels.triton.grouped_matmul import GroupedShape, add_slots, grouped_one_row, grouped_tiles
    from quire.ops.grouped import grouped_down, grouped_gate_up
    from tests.ops.inputs.grouped import generate_down_inputs, generate_gate_up_inputs

    def on_device(inputs: tuple[object, ...]) -> tuple[object, ...]:
        return tuple(value.to(DEVICE) if isinstance(value, torch.Tensor) else value for value in inputs)

    shape = GroupedShape(bn=32, bk=32, num_stages=2)
    given = generate_gate_up_inputs(seed)
    x, ids, weight, bias, activation = on_device(given)
    expected = grouped_gate_up(*given).flatten(0, 1)
    slots = sort_slots(ids, weight.shape[0], shape.bt)
    out = grouped_tiles(x, slots, weight, bias, ids.shape[1], shape, activation)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-4)
    if x.shape[0] <= 3:
        out = grouped_one_row(x, ids, weight, bias, ids.shape[1], activation, lines=8, cols=64)
        torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-4)

    given = generate_down_inputs(seed)
    a, ids, weights, weight, bias = on_device(given)
    slots = sort_slots(ids, weight.shape[0], shape.bt)
    results = [grouped_tiles(a, slots, weight, bias, 1, shape)]
    if a.shape[0] <= 3:
        results.append(grouped_one_row(a, ids, weight, bias, 1, lines=4, cols=32))
    for y in results:
        out = add_slots(y.view(*ids.shape, -1), weights)
        torch.testing.assert_close(out.cpu(), grouped_down(*given), rtol=1e-4, atol=1e-4)


def half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(DEVICE, HALF)


def assert_near(out: torch.Tensor, expected: torch.Tensor) -> None:
    """As near as eight bits of a matmul's sides allow."""
    torch.testing.assert_close(out.float().cpu(), expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("seed", [1, 4])
def test_sorted_lines(seed: int) -> None:
    from quire.kernels.triton.expert_slots import sort_slots
    from quire.kernels.triton.grouped_matmul import GroupedShape, add_slots
    from quire.kernels.triton.grouped_sorted import grouped_sorted
    from quire.ops.grouped import grouped_down, grouped_gate_up
    from tests.ops.inputs.grouped import generate_down_inputs, generate_gate_up_inputs

    shape = GroupedShape(bt=16, bn=32, bk=16, num_stages=2)
    x, ids, weight, bias, activation = generate_gate_up_inputs(seed)
    expected = grouped_gate_up(x, ids, weight, bias, activation).flatten(0, 1)
    slots = sort_slots(ids.to(DEVICE), weight.shape[0], shape.bt)
    order = slots.order.cpu().long()
    given = (slots, half(weight), None if bias is None else half(bias), shape, activation)
    lines = half(x.repeat_interleave(ids.shape[1], 0)[order])
    assert_near(grouped_sorted(lines, *given), expected[order])
    assert_near(grouped_sorted(half(x), *given, per_row=ids.shape[1]), expected[order])

    a, ids, weights, weight, bias = generate_down_inputs(seed)
    order = (slots := sort_slots(ids.to(DEVICE), weight.shape[0], shape.bt)).order.cpu().long()
    given = (slots, half(weight), None if bias is None else half(bias), shape)
    y = grouped_sorted(half(a.flatten(0, 1)[order]), *given, scatter=True)
    out = add_slots(y.view(*ids.shape, -1), weights.to(DEVICE))
    assert_near(out, grouped_down(a, ids, weights, weight, bias))


@pytest.mark.parametrize("n", [1, 2, 17])
@pytest.mark.parametrize("width", [12, 24, 72])  # narrower and wider than an expert
def test_a_shared_expert_is_one_part_more(n: int, width: int) -> None:
    from quire.kernels.triton.sparse_mlp import sparse_mlp
    from quire.ops import grouped

    generator, h, f, experts, k = torch.Generator().manual_seed(n), 48, 24, 8, 3
    x, ids, weights = torch.randn(n, h, generator=generator), ids_of(n, k, experts), torch.rand(n, k)
    shapes = ((experts, 2 * f, h), (experts, h, f), (2 * width, h), (h, width))
    gate_up, down, *shared = (torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for shape in shapes)
    given = (x, ids, weights, gate_up, None, down, None, "silu", True, tuple(shared))
    placed = torch.utils._pytree.tree_map(lambda v: v.to(DEVICE) if isinstance(v, torch.Tensor) else v, given)
    parts = sparse_mlp(*placed)
    assert parts.shape[0] > k
    torch.testing.assert_close(parts.sum(0).cpu(), grouped.sparse_mlp(*given)[0], rtol=1e-4, atol=1e-4)


def test_a_token_has_the_same_bits_in_a_step_of_any_size() -> None:
    """In parts, which the norm behind them adds up, only few tokens were, with other bits than in a long step."""
    from quire.kernels.triton.sparse_mlp import sparse_mlp_fixed

    torch.manual_seed(0)
    n, h, f, experts, k = 300, 64, 32, 8, 3
    x, ids, weights = torch.randn(n, h), ids_of(n, k, experts), torch.rand(n, k)
    gate_up, down = torch.randn(experts, 2 * f, h) * h**-0.5, torch.randn(experts, h, f) * f**-0.5
    tokens = [value.to(DEVICE) for value in (x.to(HALF), ids, weights)]
    given = (gate_up.to(DEVICE, HALF), None, down.to(DEVICE, HALF), None, "silu", True)
    whole = sparse_mlp_fixed(*tokens, *given)
    assert whole.shape[0] == 1
    for rows in (1, 7, 64):
        few = sparse_mlp_fixed(*(value[-rows:].contiguous() for value in tokens), *given)
        assert torch.equal(few, whole[:, -rows:])
