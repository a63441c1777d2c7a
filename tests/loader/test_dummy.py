from __future__ import annotations

import pytest
import torch
from torch import nn

from quire.layers.experts import GroupedDown, GroupedGateUp, Router
from quire.layers.linear import MergedColumnParallelLinear
from quire.layers.norm import RMSNorm
from quire.layers.quant.packed_weights import PackedWeightGrouped, PackedWeightLinear, PackedWeights
from quire.layers.quant.plain import PlainLinear
from quire.loader.dummy import AMPLITUDE, dummy_schemes, fill_dummy
from quire.loader.mapper import bytes_in
from quire.ops.base import Target
from quire.ops.routing import Routing
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


@pytest.mark.parametrize("method", ["mxfp4", "awq", "gptq", "fp8", None])
def test_quantized_where_the_config_says_so(method: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """MXFP4 is that of gpt-oss: experts alone, gates and what they gate taking turns."""
    monkeypatch.setattr(PackedWeights, "serves", lambda self, target: True)
    target, group = Target("elsewhere", quantization="stored"), ParallelGroup()
    experts = {"bias": True, "layout": "interleaved_columns", "target": target, "group": group}
    model = nn.ModuleDict(
        {
            "router": Router(64, 4, Routing(2), bias=True, choice_bias=False, target=target),
            "gate_up": GroupedGateUp(4, 64, 128, "silu", **experts),  # type: ignore[arg-type]
            "down": GroupedDown(4, 128, 64, **experts),  # type: ignore[arg-type]
            "qkv": MergedColumnParallelLinear(64, {"q": 64, "k": 64}, bias=True, target=target, group=group),
        }
    )
    settings = {"quant_method": method, "bits": 4, "group_size": 64, "weight_block_size": [64, 64]}
    config = {} if method is None else {"quantization_config": settings}
    schemes = dummy_schemes(model, config)
    planned = bytes_in(model, schemes)
    fill_dummy(model, schemes=schemes)
    assert planned == sum(parameter.nbytes for parameter in model.parameters())
    kept = {name: type(layer.method) for name, layer in model.items()}
    assert kept["router"] is PlainLinear
    assert (kept["gate_up"] is PackedWeightGrouped) == (kept["down"] is PackedWeightGrouped) == (method is not None)
    assert (kept["qkv"] is PackedWeightLinear) == (method in ("awq", "gptq", "fp8"))
    for name in ("gate_up", "down", "qkv"):
        if kept[name] in (PackedWeightGrouped, PackedWeightLinear):
            values = model[name].method._store.weight.unpacked()
            assert 0.2 * AMPLITUDE < values.std() < AMPLITUDE
            assert values.abs().max() <= 1.01 * AMPLITUDE
