"""Grouped matmuls and routing on every instruction set: right against a loop over experts, each row as if alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.cpu import grouped, ops
from quire.kernels.cpu.grouped import ACTIVATIONS, GroupedMatmul
from quire.kernels.cpu.matrix import Matmul, PackedMatrix
from quire.ops.gated_linear import ACTIVATIONS as REFERENCES
from quire.ops.grouped import add_shared
from quire.ops.norm import add_layer_norm, layer_norm
from quire.ops.routing import route
from tests.kernels.cpu.isa import each_instruction_set, needs_library, using
from tests.kernels.cpu.test_matrix import ARITHMETIC, inner_size, make
from tests.ops.inputs.grouped import generate_shared_inputs
from tests.ops.inputs.routing import ROUTINGS, generate_inputs

pytestmark = needs_library

EXPERTS, SLOTS = 6, 3
# One token, few and many of them; the last all go to the same experts, which then have more rows than any tile.
SIZES = (1, 64, 300)


def experts_of(kind: str, pieces: int, outputs: int, inner: int) -> list[list[PackedMatrix]]:
    return [[make(kind, outputs, inner, seed=10 * e + p) for p in range(pieces)] for e in range(EXPERTS)]


def expert_ids(tokens: int) -> Tensor:
    if tokens == SIZES[-1]:
        return torch.tensor([[4, 0, 2]], dtype=torch.int32).expand(tokens, -1).contiguous()
    return torch.rand(tokens, EXPERTS).argsort(-1)[:, :SLOTS].to(torch.int32)


def of_slots(experts: list[list[PackedMatrix]], bias: Tensor, activations: str, x: Tensor, ids: Tensor) -> Tensor:
    """x [tokens, inner] or [tokens, slots, inner] times the matrices of each slot's expert, by the dense matmul."""
    rows = x.repeat_interleave(ids.shape[1], 0) if x.dim() == 2 else x.flatten(0, 1)
    out = torch.empty(len(rows), bias.shape[1])
    for expert, (matrices, own_bias) in enumerate(zip(experts, bias, strict=True)):
        chosen = (ids.flatten() == expert).nonzero().flatten()
        if len(chosen):
            out[chosen] = Matmul(matrices, own_bias, activations)(rows[chosen])
    return out.view(*ids.shape, -1)


@each_instruction_set
@pytest.mark.parametrize(("kind", "activations"), ARITHMETIC)
def test_every_format_multiplies_each_row_as_if_alone(isa: str, kind: str, activations: str) -> None:
    """To the last bit what the dense matmul of each expert gives, which other tests hold."""
    torch.manual_seed(0)
    inner, width, outputs = inner_size(kind, 40), 21, 37
    with using(isa, threads=2):
        gates, downs = experts_of(kind, 2, width, inner), experts_of(kind, 1, outputs, inner)
        gate_bias, down_bias = torch.randn(EXPERTS, 2 * width), torch.randn(EXPERTS, outputs)
        gate_up = GroupedMatmul(gates, gate_bias, activations)
        down = GroupedMatmul(downs, down_bias, activations)
        assert gate_up.activations == activations
        for tokens in SIZES:
            x, a = torch.randn(tokens, inner), torch.randn(tokens, SLOTS, inner)
            ids, weights = expert_ids(tokens), torch.rand(tokens, SLOTS)
            activation = tokens % len(ACTIVATIONS)
            gated = gate_up.gate_up(x, ids, ACTIVATIONS[activation])
            expected = ops._gated(of_slots(gates, gate_bias, activations, x, ids).flatten(0, 1), activation)
            assert torch.equal(gated.flatten(0, 1), expected)
            results = of_slots(downs, down_bias, activations, a, ids)
            total = results[:, 0] * weights[:, :1]
            for slot in range(1, SLOTS):
                total = total + results[:, slot] * weights[:, slot : slot + 1]
            assert torch.equal(down.down(a, ids, weights), total)


@each_instruction_set
def test_gates_are_the_references(isa: str) -> None:
    x = torch.randn(9, 2 * 21) * 6
    with using(isa):
        for index, name in enumerate(ACTIVATIONS):
            torch.testing.assert_close(ops._gated(x, index), REFERENCES[name](x), atol=1e-5, rtol=1e-5)


@each_instruction_set
@pytest.mark.parametrize(
    ("kind", "activations"),
    [("float32", "float32"), ("int8", "int16"), ("int4", "int16"), ("int8", "int8"), ("int4", "int8")],
)
def test_rows_that_are_not_finite_stay_by_themselves(isa: str, kind: str, activations: str) -> None:
    torch.manual_seed(0)
    x, ids, weights = torch.randn(40, 64), expert_ids(40), torch.rand(40, SLOTS)
    broken = x.clone()
    broken[3, 5], broken[17, 0], broken[30, 63] = torch.nan, torch.inf, -torch.inf
    with using(isa):
        gate_up = GroupedMatmul(experts_of(kind, 2, 32, 64), None, activations)
        down = GroupedMatmul(experts_of(kind, 1, 24, 32), None, activations)
        good, bad = (down.down(gate_up.gate_up(each, ids, "silu"), ids, weights) for each in (x, broken))
    others = [row for row in range(40) if row not in (3, 17, 30)]
    assert torch.equal(bad[others], good[others])
    assert not bad[[3, 17, 30]].isfinite().all(dim=1).any()


@each_instruction_set
@pytest.mark.parametrize("seed", range(12))
def test_routes_are_the_references(isa: str, seed: int) -> None:
    logits, bias, routing = generate_inputs(seed)
    with using(isa):
        for scale in (1.0, 30.0):
            ids, weights = grouped.route(logits * scale, bias, routing)
            expected = route(logits * scale, bias, routing)
            assert torch.equal(ids, expected[0])
            torch.testing.assert_close(weights, expected[1], atol=1e-5, rtol=1e-5)
        broken = logits.clone()
        broken[0] = torch.nan
        ids, _ = grouped.route(broken, bias, routing)
        assert ids[0].unique().numel() == routing.top_k, "experts that exist, none twice"
        assert torch.equal(ids[1:], grouped.route(logits, bias, routing)[0][1:])


@each_instruction_set
@pytest.mark.parametrize("routing", ROUTINGS, ids=range(len(ROUTINGS)))
def test_a_row_is_routed_alike_in_every_batch(isa: str, routing: object) -> None:
    logits = torch.randn(70, 32) * 3
    with using(isa, threads=2):
        ids, weights = grouped.route(logits, None, routing)  # type: ignore[arg-type]
        for row in (0, 31, 69):
            alone = grouped.route(logits[row : row + 1], None, routing)  # type: ignore[arg-type]
            assert torch.equal(alone[0][0], ids[row])
            assert torch.equal(alone[1][0], weights[row])


@each_instruction_set
@pytest.mark.parametrize("seed", range(6))
def test_shared_experts_are_added(isa: str, seed: int) -> None:
    routed, shared, gate = generate_shared_inputs(seed)
    routed[0, 0], shared[0, -1] = torch.inf, torch.nan
    if gate is not None:
        gate[-1] = 200.0
    with using(isa):
        found = grouped.add_shared(routed, shared, gate)
        torch.testing.assert_close(found, add_shared(routed, shared, gate), equal_nan=True)
        last = grouped.add_shared(routed[-1:], shared[-1:], None if gate is None else gate[-1:])
        torch.testing.assert_close(last[0], found[-1], rtol=0, atol=0, equal_nan=True)


@each_instruction_set
@pytest.mark.parametrize("width", [1, 7, 16, 33, 130])
def test_layer_norms(isa: str, width: int) -> None:
    torch.manual_seed(width)
    x, residual, weight, bias = torch.randn(9, width), torch.randn(9, width), torch.randn(width), torch.randn(width)
    x[3, 0], x[5, -1], x[7] = torch.nan, torch.inf, 1e-30
    with using(isa):
        normed = ops.layer_norm(x, weight, bias, 1e-5)
        torch.testing.assert_close(normed, layer_norm(x, weight, bias, 1e-5), atol=2e-5, rtol=1e-4, equal_nan=True)
        both = ops.add_layer_norm(x, residual, weight, bias, 1e-5)
        for mine, theirs in zip(both, add_layer_norm(x, residual, weight, bias, 1e-5), strict=True):
            torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4, equal_nan=True)
        assert torch.equal(ops.layer_norm(x[-1:], weight, bias, 1e-5)[0], normed[-1])
