from __future__ import annotations

import pytest
import torch
from torch import nn

from quire.layers.linear import MergedColumnParallelLinear
from quire.layers.norm import RMSNorm
from quire.loader.dummy import AMPLITUDE, fill_dummy
from quire.ops.base import Target
from quire.parallel.groups import ParallelGroup


def make(
    names: tuple[str, ...] = ("a", "b"), dtype: torch.dtype = torch.float32, rank: int = 0, size: int = 1
) -> nn.Module:
    """Two merged layers and a norm, kept plain."""
    target = Target("elsewhere", dtype)
    layers: dict[str, nn.Module] = {
        name: MergedColumnParallelLinear(
            30, {"gate": 24, "up": 16}, bias=True, target=target, group=ParallelGroup(rank, size)
        )
        for name in names
    }
    return nn.ModuleDict({**layers, "norm": RMSNorm(64, eps=1e-6, target=target)})


def filled(seed: int = 0, **options: object) -> dict[str, torch.Tensor]:
    model = make(**options)  # type: ignore[arg-type]  # one dict of options for both
    fill_dummy(model, seed)
    return dict(model.named_parameters())


def test_values_depend_on_seed_and_name_only() -> None:
    first, again, other = filled(), filled(names=("b", "a")), filled(seed=1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["a.method.weight"], other["a.method.weight"])
    assert not torch.equal(first["a.method.weight"], first["b.method.weight"])


def test_values_lie_around_zero_and_norms_around_one() -> None:
    found = filled()
    for name in ("a.method.weight", "a.method.bias"):
        assert found[name].abs().max() <= AMPLITUDE
        assert found[name].std() > 0.3 * AMPLITUDE
    assert (found["norm.weight"] - 1).abs().max() <= 1.01 * AMPLITUDE


def test_every_dtype_gets_the_same_numbers() -> None:
    full, half = filled(), filled(dtype=torch.bfloat16)
    assert all(torch.equal(full[name].bfloat16(), half[name]) for name in full)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hold_parts_of_the_same_model(size: int) -> None:
    whole = filled()["a.method.weight"].split([24, 16], dim=1)
    for rank in range(size):
        part = filled(rank=rank, size=size)["a.method.weight"].split([24 // size, 16 // size], dim=1)
        for mine, all_of_it in zip(part, whole, strict=True):
            assert torch.equal(mine, all_of_it.chunk(size, dim=1)[rank])
