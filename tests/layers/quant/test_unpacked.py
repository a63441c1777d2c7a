"""Weights that are unpacked for each matmul: the values of the checkpoint, in the bytes that were planned."""

from __future__ import annotations

import pytest
import torch

from quire.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from quire.layers.quant.base import MatrixSpec
from quire.layers.quant.fp8 import Fp8Linear
from quire.layers.quant.rounding import has_fp8_rows, round_to_mxfp4
from quire.layers.quant.unpacked import UnpackedLinear
from quire.layers.scheme import TABLES, StoredMatrix, as_tensor, float_scheme
from quire.loader.hub import resolve_model
from quire.loader.open import open_checkpoint
from quire.ops.base import Target
from quire.parallel.groups import ParallelGroup
from quire.types.errors import ConfigError
from tests.loader.quantized.test_checkpoints import NAMES, ROOT

TARGET = Target("elsewhere", torch.float32, "unpacked")
LAYER = "model.layers.0.mlp.down_proj.weight"


def stored(name: str, tensor: str = LAYER) -> StoredMatrix:
    weight = open_checkpoint(resolve_model(str(ROOT / name))).stored(tensor)
    assert isinstance(weight, StoredMatrix)
    return weight


@pytest.mark.parametrize("name", NAMES)
def test_any_scheme_multiplies_by_its_values_in_the_planned_bytes(name: str) -> None:
    weight = stored(name)
    layer = ColumnParallelLinear(*weight.shape[::-1], bias=False, target=TARGET, group=ParallelGroup())
    layer.allocate("down_proj", {("weight", None): weight.scheme})
    assert isinstance(layer.method, UnpackedLinear)
    planned = layer.planned_bytes({("weight", None): weight.scheme})
    layer.load("weight", None, weight)
    layer.finish()
    assert layer.method.num_bytes == planned < weight.shape[0] * weight.shape[1] * 2.5
    x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(x), x @ weight.tensor().t(), atol=1e-6, rtol=1e-5)


def test_merged_pieces_keep_their_own_schemes() -> None:
    names = ("q_proj", "k_proj", "v_proj")
    pieces = {name: stored("ct-mixed", f"model.layers.0.self_attn.{name}.weight") for name in names}
    layer = QKVParallelLinear(32, 2, 1, 16, bias=False, target=TARGET, group=ParallelGroup())
    layer.allocate("qkv_proj", {("weight", name): weight.scheme for name, weight in pieces.items()})
    for name, weight in pieces.items():
        layer.load("weight", name, weight)
    assert {weight.scheme.element for weight in pieces.values()} == {"INT8", "UINT4"}
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    expected = x @ torch.cat([weight.tensor() for weight in pieces.values()]).t()
    torch.testing.assert_close(layer(x), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["gptq", "gptq-act-order", "ct-nvfp4", "fp8-block"])
def test_slices_of_inputs(name: str) -> None:
    weight = stored(name)
    x, share = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0)), weight.shape[1] // 2
    total = torch.zeros(3, weight.shape[0])
    for rank in range(2):
        layer = RowParallelLinear(*weight.shape[::-1], bias=False, target=TARGET, group=ParallelGroup(rank, 2))
        layer.allocate("down_proj", {("weight", None): weight.scheme}).load("weight", None, weight)
        part = layer(x[:, rank * share : (rank + 1) * share])
        assert isinstance(part, torch.Tensor)
        total += part
    torch.testing.assert_close(total, x @ as_tensor(weight).t(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["fp8-tensor-static", "fp8-channel", "ct-w8a8-fp8", "modelopt-fp8"])
def test_fp8_rows_are_not_quantized_again(name: str) -> None:
    weight = stored(name)
    assert has_fp8_rows(weight.scheme)
    method = Fp8Linear(MatrixSpec(weight.shape[1], (weight.shape[0],), False, TARGET))
    method.load(0, weight)
    assert torch.equal(method.weight.view(torch.uint8), weight.tensors["weight"].view(torch.uint8))
    assert torch.equal(method.weight.float() * method.scale[:, None], weight.tensor())
    assert not has_fp8_rows(stored("fp8-block").scheme)


def test_float_weights_become_the_nearest_4_bit_floats() -> None:
    target = Target("elsewhere", torch.float32, "mxfp4")
    layer = ColumnParallelLinear(64, 24, bias=False, target=target, group=ParallelGroup()).allocate("up_proj")
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    planned = layer.planned_bytes({("weight", None): float_scheme(torch.float32)})
    layer.load("weight", None, weight)
    assert layer.method.num_bytes == planned == 24 * 64 * 4.25 / 8
    found = layer(torch.eye(64))
    assert isinstance(found, torch.Tensor)
    steps = 2.0 ** (weight.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True).log2().floor() - 2)
    scaled, mine = weight.unflatten(1, (-1, 32)) / steps, found.t().unflatten(1, (-1, 32)) / steps
    values = torch.tensor(TABLES["E2M1"])
    best = (scaled.unsqueeze(-1) - values).abs().amin(-1)
    torch.testing.assert_close((mine - scaled).abs(), best, atol=1e-6, rtol=0)


def test_weights_that_lie_in_columns_are_rounded_alike() -> None:
    """Without torch's warning of slow searches, which people would see for each layer."""
    weight = torch.randn(64, 24)
    rounded = [round_to_mxfp4(values).tensors for values in (weight.t(), weight.t().contiguous())]
    assert all(torch.equal(rounded[0][role], rounded[1][role]) for role in rounded[0])


def test_what_cannot_be_rounded_is_named() -> None:
    target = Target("elsewhere", torch.float32, "mxfp4")
    for inputs, scheme, message in (
        (40, float_scheme(torch.float32), "up_proj has 40 inputs, which are no whole groups of 32; leave"),
        (64, stored("gptq").scheme, "up_proj is quantized already .its weights are UINT4.; leave"),
    ):
        layer = ColumnParallelLinear(inputs, 24, bias=False, target=target, group=ParallelGroup()).allocate("up_proj")
        with pytest.raises(ConfigError, match=message):
            layer.planned_bytes({("weight", None): scheme})
