from __future__ import annotations

import torch

from quire.loader.dummy import AMPLITUDE, fill_dummy


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    shapes = {"a.weight": (40, 30), "b.weight": (40, 30), "a.norm.weight": (64,), "a.bias": (64,)}
    return {name: torch.nn.Parameter(torch.empty(shape, dtype=dtype)) for name, shape in shapes.items()}


def filled(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    found = parameters(dtype)
    fill_dummy(found.items(), seed)
    return found


def test_values_depend_on_seed_and_name_only() -> None:
    first, again, other = filled(), parameters(), filled(seed=1)
    fill_dummy(reversed(again.items()), 0)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["a.weight"], other["a.weight"])
    assert not torch.equal(first["a.weight"], first["b.weight"])


def test_values_lie_around_zero_and_norms_around_one() -> None:
    found = filled()
    for name in ("a.weight", "a.bias"):
        assert found[name].abs().max() <= AMPLITUDE
        assert found[name].std() > 0.3 * AMPLITUDE
    assert (found["a.norm.weight"] - 1).abs().max() <= 1.01 * AMPLITUDE


def test_every_dtype_gets_the_same_numbers() -> None:
    full, half = filled(), filled(dtype=torch.bfloat16)
    assert all(torch.equal(full[name].bfloat16(), half[name]) for name in full)
