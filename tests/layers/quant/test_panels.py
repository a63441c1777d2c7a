"""Schemes that the panels of the CPU kernels hold: no value changes, matmuls are those of the decoded matrix."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.cpu.library import unavailable
from quire.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from quire.layers.quant.base import MatrixSpec
from quire.layers.quant.packed import PackedGrouped, PackedLinear
from quire.layers.quant.panels import panel_format
from quire.layers.scheme import Packing, Role, ScaleGrid, Scheme, StoredMatrix, ZeroPoints, as_tensor, in_words
from quire.loader.hub import resolve_model
from quire.loader.open import open_checkpoint
from quire.ops.base import Target
from quire.ops.grouped import grouped_gate_up
from quire.parallel.groups import ParallelGroup
from quire.types.errors import CheckpointError
from tests.loader.quantized.test_checkpoints import NAMES, ROOT

pytestmark = pytest.mark.skipif(unavailable() is not None, reason="needs the native CPU library")

LAYER = "model.layers.0.mlp.down_proj.weight"
# What a committed checkpoint becomes; the others are decoded to float32.
FORMATS = {
    "awq": "code4_min_f32",
    "bnb-fp4": "fp4",
    "bnb-int8": "code8_32",
    "bnb-nf4": "nf4",
    "ct-fp8-static": "e4m3",
    "ct-mixed": "code4_min_f32",
    "ct-mxfp4": "e2m1",
    "ct-nvfp4": "e2m1_16",
    "ct-w3a16": "code4_min_f32",
    "ct-w4a16": "code4_min_f32",
    "ct-w4a16-asym": "code4_min_f32",
    "ct-w8a16": "code8_32",
    "ct-w8a8-fp8": "e4m3",
    "ct-w8a8-int8": "code8_32",
    "ct-w8a8-int8-asym": "code8_min_f32",
    "fp8-channel": "e4m3",
    "fp8-tensor-static": "e4m3",
    "gptq": "code4_min_f32",
    "gptq-8bit": "code8_min_f32",
    "gptq-act-order": "code4_min_f32",
    "gptq-sym-channel": "code4_min_f32",
    "gptq-v2-3bit": "code4_min_f32",
    "modelopt-fp8": "e4m3",
    "modelopt-nvfp4": "e2m1_16",
    "torchao-fp8": "e4m3",
    "torchao-int4": "code8_min_f32",
    "torchao-int4-packed": "code4_min_f32",
    "torchao-int8": "code8_min_f32",
    "torchao-int8-dynamic": "code8_min_f32",
}


def load(weight: StoredMatrix, activations: str = "float32") -> PackedLinear:
    rows, columns = weight.shape
    target = Target(activations=activations)
    layer = ColumnParallelLinear(columns, rows, bias=False, target=target, group=ParallelGroup()).allocate()
    planned = layer.planned_bytes({("weight", None): weight.scheme})
    layer.load("weight", None, weight)
    layer.finish()
    assert isinstance(layer.method, PackedLinear)
    assert layer.method.num_bytes == planned
    return layer.method


@pytest.mark.parametrize("name", NAMES)
def test_stored_integers_stay_what_they_are(name: str) -> None:
    weight = open_checkpoint(resolve_model(str(ROOT / name))).stored(LAYER)
    assert isinstance(weight, StoredMatrix)
    method = load(weight)
    (matrix,) = method.matrices
    assert matrix.format == FORMATS.get(name, "float32")
    assert method.decodes(weight.scheme) == (name not in FORMATS)
    assert torch.equal(matrix.dequantize(), weight.tensor())
    x = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(0))
    expected = x.double() @ weight.tensor().double().t()
    torch.testing.assert_close(method.multiply(x).double(), expected, atol=2e-5, rtol=2e-5)
    if name in FORMATS:
        rounded = load(weight, "int16").multiply(x).double()
        assert (rounded - expected).abs().max() < 1e-3 * expected.abs().max()


@pytest.mark.parametrize("shape", [(1, 32), (17, 64), (40, 96), (33, 160)])
@pytest.mark.parametrize("group", [32, 64, None])
def test_odd_shapes(shape: tuple[int, int], group: int | None) -> None:
    generator = torch.Generator().manual_seed(shape[0])
    rows, columns = shape
    groups = 1 if group is None else -(-columns // group)
    codes = torch.randint(0, 16, shape, generator=generator)
    words = (codes.unflatten(1, (-1, 8)) << 4 * torch.arange(8)).sum(-1)
    tensors: dict[Role, torch.Tensor] = {
        "weight": (words - ((words >> 31) << 32)).int(),
        "scales": torch.rand(rows, groups, generator=generator).half(),
    }
    roles: tuple[tuple[Role, str], ...] = (("weight", "w"), ("scales", "s"))
    scheme = Scheme("UINT4", None, in_words(4), ScaleGrid(1, group, torch.float16), ZeroPoints(8.0), roles=roles)
    matrix = StoredMatrix(scheme, shape, tensors)
    (packed,) = load(matrix).matrices
    assert packed.format == "code4"
    assert torch.equal(packed.dequantize(), matrix.tensor())


def test_slices_of_inputs_stay_packed_where_they_cut_no_word() -> None:
    weight = open_checkpoint(resolve_model(str(ROOT / "gptq"))).stored(LAYER)
    assert isinstance(weight, StoredMatrix)
    x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0))
    exact = Target(activations="float32")
    total, share = torch.zeros(3, weight.shape[0]), weight.shape[1] // 2
    for rank in range(2):
        layer = RowParallelLinear(*weight.shape[::-1], bias=False, target=exact, group=ParallelGroup(rank, 2))
        layer.allocate().load("weight", None, weight)
        layer.finish()
        assert isinstance(layer.method, PackedLinear)
        assert layer.method.matrices[0].format == "code4_min_f32"
        part = layer(x[:, rank * share : (rank + 1) * share])
        assert isinstance(part, torch.Tensor)
        total += part
    torch.testing.assert_close(total, x @ as_tensor(weight).t(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme(
            "NF4",
            packing=Packing(torch.uint8, (1, 0)),
            scales=ScaleGrid(1, 48, torch.float32),
            roles=(("weight", "w"), ("scales", "s")),
        ),
        Scheme("INT8", scales=ScaleGrid(1, 40, torch.float32), roles=(("weight", "w"), ("scales", "s"))),
    ],
    ids=["groups of 48", "groups of 40"],
)
def test_other_schemes_have_no_panels(scheme: Scheme) -> None:
    assert panel_format(scheme) is None


def ordered(rows: int, seed: int, width: int = 128) -> StoredMatrix:
    """4 bits in groups of 32 whose columns are anywhere."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, width), generator=generator)
    words = (codes.unflatten(1, (-1, 8)) << 4 * torch.arange(8)).sum(-1)
    roles: tuple[tuple[Role, str], ...] = (("weight", "w"), ("scales", "s"), ("group_index", "g"))
    scheme = Scheme("UINT4", None, in_words(4), ScaleGrid(1, 32, torch.float16), ZeroPoints(8.0), roles=roles)
    tensors: dict[Role, torch.Tensor] = {
        "weight": (words - ((words >> 31) << 32)).int(),
        "scales": torch.rand(rows, width // 32, generator=generator).half(),
        "group_index": torch.randperm(width, generator=generator).int() // 32,
    }
    return StoredMatrix(scheme, (rows, width), tensors)


@pytest.mark.parametrize("activations", ["float32", "int16", "int8"])
@pytest.mark.parametrize("rows", [1, 60])
def test_merged_pieces_may_have_their_inputs_in_different_orders(rows: int, activations: str) -> None:
    pieces = {"a": ordered(24, 0), "b": ordered(40, 1), "c": ordered(17, 1)}
    pieces["c"].tensors["group_index"].copy_(pieces["b"].tensors["group_index"])
    sizes = {name: piece.shape[0] for name, piece in pieces.items()}
    target = Target(activations=activations)
    layer = MergedColumnParallelLinear(128, sizes, bias=True, target=target, group=ParallelGroup()).allocate()
    bias = torch.randn(81, generator=torch.Generator().manual_seed(2))
    for name, piece in pieces.items():
        layer.load("weight", name, piece)
    for name, part in zip(pieces, bias.split(list(sizes.values())), strict=True):
        layer.load("bias", name, part)
    layer.finish()
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(3))
    expected = x @ torch.cat([piece.tensor() for piece in pieces.values()]).t() + bias
    found = layer(x)
    assert isinstance(found, torch.Tensor)
    bound = {"float32": 1e-5, "int16": 1e-3, "int8": 5e-2}[activations]
    assert (found - expected).abs().max() < bound * expected.abs().max()


@pytest.mark.parametrize("tokens", [1, 30])
def test_experts_may_have_their_inputs_in_different_orders(tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    spec = MatrixSpec(128, (32, 32), False, Target(activations="float32"), "experts", "grouped", 3)
    method = PackedGrouped(spec, None)
    stored = {}
    for expert in range(3):
        for piece in range(2):
            stored[expert, piece] = ordered(32, 2 * expert + piece)
            index = stored[expert, 0].tensors["group_index"]
            stored[expert, piece].tensors["group_index"].copy_(index)
            method.load(expert, piece, stored[expert, piece])
    method.finish()
    weight = torch.stack([torch.cat([stored[e, p].tensor() for p in range(2)]) for e in range(3)])
    x = torch.randn(tokens, 128, generator=generator)
    ids = torch.rand(tokens, 3, generator=generator).argsort(-1)[:, :2].int()
    torch.testing.assert_close(
        method.gate_up(x, ids, "silu"), grouped_gate_up(x, ids, weight, None, "silu"), atol=1e-3, rtol=1e-3
    )
    method.load(1, 1, ordered(32, 99))
    with pytest.raises(CheckpointError, match="an expert of experts have their inputs in different orders"):
        method.finish()


def test_an_index_of_uneven_groups_is_refused_by_layer() -> None:
    weight = ordered(16, 0)
    weight.tensors["group_index"][:] = 0
    method = PackedLinear(MatrixSpec(128, (16,), False, Target(), "mlp.down_proj"), None)
    with pytest.raises(CheckpointError, match=r"group index of mlp\.down_proj does not give 32 columns"):
        method.load(0, weight)
