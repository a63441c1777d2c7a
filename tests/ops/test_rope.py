from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.ops.rope import apply_rope, gather_rotation
from tests.ops.inputs.rope import generate_inputs
from tests.ops.rows import assert_rows_independent


def table(length: int, rotary_dim: int) -> Tensor:
    angles = torch.arange(length).unsqueeze(1) * torch.rand(
        rotary_dim // 2, generator=torch.Generator().manual_seed(1)
    )
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


@pytest.mark.parametrize("seed", range(6))
def test_rotates_pairs_as_complex_numbers(seed: int) -> None:
    x, cos, sin = generate_inputs(seed)
    half = x.shape[-1] // 2
    factor = torch.complex(cos[..., :half].double(), sin[..., half:].double())
    rotated = torch.complex(x[..., :half].double(), x[..., half:].double()) * factor
    expected = torch.cat((rotated.real, rotated.imag), dim=-1).float()
    torch.testing.assert_close(apply_rope(x, cos, sin), expected)


def test_partial_rotation_leaves_the_rest_of_each_head() -> None:
    x = torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(0))
    cos, sin = gather_rotation(table(16, 8), torch.arange(5) + 3, torch.float32)
    out = apply_rope(x, cos, sin)
    assert torch.equal(out[..., 8:], x[..., 8:])
    assert torch.equal(out[..., :8], apply_rope(x[..., :8], cos, sin))


def test_position_zero_changes_nothing_and_input_is_not_written() -> None:
    x = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    assert torch.equal(apply_rope(x, *gather_rotation(table(4, 8), torch.zeros(4).long(), torch.float32)), x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("rotary_dim", [8, 24])
def test_rows_are_independent(rotary_dim: int) -> None:
    generator, cos_sin = torch.Generator().manual_seed(0), table(512, rotary_dim)

    def op(x: Tensor) -> Tensor:
        positions = x[:, 0, 0].abs().mul(50).long()  # a row's position is a function of the row
        return apply_rope(x, *gather_rotation(cos_sin, positions, torch.float32))

    assert_rows_independent(op, lambda n: torch.randn(n, 3, 24, generator=generator))
