"""The sparse MLP of a mixture of experts: which kernels for how many tokens.

One token uses multiply-and-add with the lines of its experts. A few are sorted by expert, so that each expert's
matrices are read once; of many what is between the two matmuls lies in the order of their experts.
"""

from __future__ import annotations

from torch import Tensor

from quire.kernels.triton.expert_slots import sort_slots
from quire.kernels.triton.grouped_configs import shapes_for
from quire.kernels.triton.grouped_matmul import add_slots, grouped_one_row, grouped_tiles
from quire.kernels.triton.grouped_sorted import grouped_sorted, sorted_fits

_MAX_ROWS_ALONE = 2
_MAX_ROWS_APART = 256  # whose slots are left to the next kernel to add up
# Slots an expert has on average, by which it is chosen how tiles are cut.
FEW = 8
SOME = 64


def sparse_mlp(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
    in_parts: bool,
) -> Tensor:
    """x [n, h], expert_ids and weights [n, k] -> [1, n, h] in x's type, or `in_parts` [k, n, h] float32."""
    n, k = expert_ids.shape
    if 0 < n <= _MAX_ROWS_ALONE:
        a = grouped_one_row(x, expert_ids, gate_up, gate_up_bias, k, activation, lines=16, cols=256)
        y = grouped_one_row(
            a, expert_ids, down, down_bias, 1, lines=4, cols=256, weights=weights if in_parts else None
        )
        return y if in_parts else add_slots(y.view(n, k, -1), weights).unsqueeze(0)
    return sparse_mlp_fixed(x, expert_ids, weights, gate_up, gate_up_bias, down, down_bias, activation, in_parts)


def sparse_mlp_fixed(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
    in_parts: bool,
) -> Tensor:
    """The same, every inner sum in one order for any number of tokens."""
    n, k = expert_ids.shape
    num_experts = gate_up.shape[0]
    if n == 0:
        return x.new_empty(1, 0, down.shape[1])
    mean = n * k / num_experts
    shapes = shapes_for(num_experts, down.shape[2], x.dtype)
    if mean <= SOME or not sorted_fits(x, gate_up, down):
        shape = shapes.few if mean <= FEW else shapes.some if mean <= SOME else shapes.many
        slots = sort_slots(expert_ids, num_experts, shape.bt)
        a = grouped_tiles(x, slots, gate_up, gate_up_bias, k, shape, activation)
        if in_parts and n <= _MAX_ROWS_APART:
            return grouped_tiles(a, slots, down, down_bias, 1, shape, weights=weights)
        y = grouped_tiles(a, slots, down, down_bias, 1, shape)
    else:
        slots = sort_slots(expert_ids, num_experts, shapes.sorted.bt)
        a = grouped_sorted(x, slots, gate_up, gate_up_bias, shapes.sorted_gated, activation, per_row=k)
        y = grouped_sorted(a, slots, down, down_bias, shapes.sorted, scatter=True)
    return add_slots(y.view(n, k, -1), weights).unsqueeze(0)
