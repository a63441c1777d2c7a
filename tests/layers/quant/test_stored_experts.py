"""Experts in every format of checkpoints: a loop over what they decode to, and a row alone is that row among 64."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.cpu.library import unavailable
from quire.layers.quant.base import GroupedMethod, MatrixSpec
from quire.layers.quant.registry import choose_grouped
from quire.layers.scheme import StoredMatrix, as_tensor
from quire.loader.hub import resolve_model
from quire.loader.open import open_checkpoint
from quire.ops.base import Target
from quire.ops.grouped import grouped_down, grouped_gate_up
from tests.loader.quantized.test_checkpoints import NAMES, ROOT

BOUNDS = {"float32": 1e-5, "int16": 2e-4, "int8": 4e-2}  # as a part of the largest result
if unavailable() is not None:
    BOUNDS = {"float32": 1e-5}
COUNT, TOKENS, TOP_K = 3, 64, 2


def loaded(experts: list[list[StoredMatrix]], activations: str) -> tuple[GroupedMethod, torch.Tensor]:
    """The method for experts of these pieces, and the matrices that they stand for."""
    pieces = tuple(piece.shape[0] for piece in experts[0])
    target = Target(activations=activations)
    spec = MatrixSpec(experts[0][0].shape[1], pieces, False, target, "experts", "grouped", COUNT)
    method = choose_grouped(spec, [piece.scheme for expert in experts for piece in expert])
    for index, expert in enumerate(experts):
        for piece, rows in enumerate(expert):
            method.load(index, piece, rows)
    method.finish()
    return method, torch.stack([torch.cat([as_tensor(piece) for piece in expert]).float() for expert in experts])


@pytest.mark.parametrize("activations", BOUNDS)
@pytest.mark.parametrize("name", NAMES)
def test_experts_of_every_format(name: str, activations: str) -> None:
    checkpoint = open_checkpoint(resolve_model(str(ROOT / name)))
    found = [checkpoint.stored(f"model.layers.0.mlp.{leaf}_proj.weight") for leaf in ("gate", "up", "down")]
    gate, up, down = (matrix for matrix in found if isinstance(matrix, StoredMatrix))
    # Pieces of an expert may differ in format, but have their inputs in one order.
    is_ordered = "group_index" in dict(gate.scheme.roles)
    first = [[gate, gate], [up, up], [gate, gate]] if is_ordered else [[gate, up], [up, gate], [gate, gate]]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, gate.shape[1], generator=generator)
    ids = torch.rand(TOKENS, COUNT, generator=generator).argsort(-1)[:, :TOP_K].int()
    weights = torch.rand(TOKENS, TOP_K, generator=generator)

    method, matrices = loaded(first, activations)
    a, expected = method.gate_up(x, ids, "silu"), grouped_gate_up(x, ids, matrices, None, "silu")
    assert (a - expected).abs().max() < BOUNDS[activations] * expected.abs().max()
    second, matrices = loaded([[down]] * COUNT, activations)
    out, expected = second.down(a, ids, weights), grouped_down(a, ids, weights, matrices, None)
    assert (out - expected).abs().max() < BOUNDS[activations] * expected.abs().max()
    for row in (slice(0, 1), slice(40, 41), slice(63, 64), slice(5, 12)):
        assert torch.equal(method.gate_up(x[row], ids[row], "silu"), a[row])
        assert torch.equal(second.down(a[row], ids[row], weights[row]), out[row])
