"""Matrices that stay in 4 bits on GPUs: the values of the checkpoint, in the bytes that were planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import gguf
import pytest
import torch
from torch import Tensor

from quire.layers.experts import GroupedDown, GroupedGateUp
from quire.layers.linear import MergedColumnParallelLinear
from quire.layers.quant.base import MatrixSpec
from quire.layers.quant.packed_weights import PackedWeightGrouped, PackedWeightLinear, PackedWeights, packed_form
from quire.layers.quant.plain import PlainGrouped, PlainLinear
from quire.layers.quant.registry import choose_grouped, choose_quantization
from quire.layers.quant.rounding import MXFP4, round_to_mxfp4
from quire.layers.scheme import (
    F32,
    Packing,
    Role,
    ScaleGrid,
    Scheme,
    StoredMatrix,
    Weight,
    ZeroPoints,
    in_words,
    rows_of,
)
from quire.loader.gguf_quants import SCHEMES as GGUF_SCHEMES
from quire.ops.base import Target
from quire.ops.grouped import sparse_mlp
from quire.parallel.groups import ParallelGroup
from quire.types.errors import CheckpointError, ConfigError
from quire.types.ledger import EngineSizes
from tests.kernels.triton.paged import needs_triton
from tests.layers.test_scheme import pack
from tests.loader.gguf_tiny import finite_blocks, k_blocks

AWQ = Packing(torch.int32, (0, 4, 1, 5, 2, 6, 3, 7))
ROLES: tuple[tuple[Role, str], ...] = (("weight", "w"), ("scales", "s"))
ZEROS: tuple[tuple[Role, str], ...] = (*ROLES, ("zeros", "z"))


def scheme(element: str, group: int | None, zeros: ZeroPoints | None = None, packing: Packing = AWQ) -> Scheme:
    roles = ZEROS if zeros is not None and zeros.implied is None else ROLES
    return Scheme(element, packing=packing, scales=ScaleGrid(1, group, torch.float16), zeros=zeros, roles=roles)


SCHEMES = {
    "awq": scheme("UINT4", 64, ZeroPoints(packing=AWQ)),
    # A stored 15 is a zero point of 16.
    "gptq": scheme("UINT4", 128, ZeroPoints(packing=in_words(4, 0), offset=1.0), in_words(4)),
    "symmetric": scheme("UINT4", 32, ZeroPoints(8.0)),
    "signed": scheme("INT4", 96),
    "signed, with zeros": scheme("INT4", 64, ZeroPoints(packing=AWQ)),
    "a scale for each row": scheme("UINT4", None, ZeroPoints(3.0)),
    "unsigned": scheme("UINT4", 64),
}
WIDTH = 384  # whole groups of all of them


def stored(kind: Scheme, rows: int, columns: int = WIDTH, seed: int = 0) -> StoredMatrix:
    generator = torch.Generator().manual_seed(seed)
    assert kind.packing is not None
    assert kind.scales is not None
    groups = 1 if kind.scales.columns is None else columns // kind.scales.columns
    tensors: dict[Role, Tensor] = {
        "weight": pack(torch.randint(0, 16, (rows, columns), generator=generator), kind.packing),
        "scales": torch.rand(rows, groups, generator=generator).half(),
    }
    if "zeros" in dict(kind.roles):
        assert kind.zeros is not None
        assert kind.zeros.packing is not None
        zeros = torch.randint(0, 16, (rows, groups), generator=generator)
        zeros[0] = 15
        tensors["zeros"] = pack(zeros, kind.zeros.packing)
    return StoredMatrix(kind, (rows, columns), tensors)


def linear(pieces: list[Weight]) -> tuple[PackedWeightLinear, int]:
    """The method of such pieces, and the bytes that it planned."""
    schemes = [piece.scheme if isinstance(piece, StoredMatrix) else F32 for piece in pieces]
    spec = MatrixSpec(pieces[0].shape[1], tuple(piece.shape[0] for piece in pieces), False, Target())
    method = PackedWeights().method(spec, schemes)
    assert isinstance(method, PackedWeightLinear)
    for index, piece in enumerate(pieces):
        method.load(index, piece)
    return method, method.planned_bytes(schemes)


@pytest.mark.parametrize("kind", SCHEMES.values(), ids=SCHEMES)
def test_no_value_changes(kind: Scheme) -> None:
    weight = stored(kind, 16)
    method, planned = linear([weight])
    assert torch.equal(method.multiply(torch.eye(WIDTH)).t(), weight.tensor())
    assert method.num_bytes == planned < 16 * WIDTH
    assert not method.decodes(kind)


def test_pieces_of_different_groups_share_a_form() -> None:
    kinds = ("awq", "gptq", "symmetric", "signed")
    pieces: list[Weight] = [stored(SCHEMES[name], 8, seed=index) for index, name in enumerate(kinds)]
    method, planned = linear(pieces)
    expected = torch.cat([piece.tensor() for piece in pieces if isinstance(piece, StoredMatrix)])
    assert torch.equal(method.multiply(torch.eye(WIDTH)).t(), expected)
    assert method.num_bytes == planned
    gated = method.gated("silu")
    assert gated is not None
    gate, up = expected.chunk(2)
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(gated(x), torch.nn.functional.silu(x @ gate.t()) * (x @ up.t()), atol=1e-3, rtol=1e-4)


def test_powers_of_two_stay_exponents() -> None:
    weight = round_to_mxfp4(torch.randn(24, 64, generator=torch.Generator().manual_seed(0)))
    method, planned = linear([weight])
    assert torch.equal(method.multiply(torch.eye(64)).t(), weight.tensor())
    assert method.num_bytes == planned == 24 * 64 * 4.25 / 8


@pytest.mark.parametrize(
    ("schemes", "inputs"),
    [
        ([F32], 128),
        ([SCHEMES["awq"]], 96),  # half a chunk
        ([scheme("UINT4", 8)], 128),
        ([scheme("UINT4", 64, ZeroPoints(0.5))], 128),
        ([scheme("UINT4", 64, ZeroPoints())], 128),  # float zero points
        ([SCHEMES["awq"], MXFP4], 128),
        ([replace(SCHEMES["awq"], roles=(*ZEROS, ("group_index", "g")))], 128),
    ],
    ids=["floats", "inputs", "groups", "fractions", "stored fractions", "two elements", "any order"],
)
def test_what_does_not_fit_is_kept_in_the_models_type(schemes: list[Scheme], inputs: int) -> None:
    spec = MatrixSpec(inputs, (64,) * len(schemes), False, Target())
    assert packed_form(inputs, schemes) is None
    assert isinstance(PackedWeights().method(spec, schemes), PlainLinear)
    assert isinstance(PackedWeights().grouped(replace(spec, role="grouped", count=2), schemes * 2), PlainGrouped)


def test_outputs_of_experts_fit_the_next_matmul() -> None:
    """Both layers of experts are kept alike."""
    spec = MatrixSpec(64, (96, 96), False, Target(), role="grouped", count=2)
    assert isinstance(PackedWeights().grouped(spec, [MXFP4] * 4), PlainGrouped)


@pytest.mark.parametrize("bias", [False, True])
def test_experts(bias: bool) -> None:
    """All experts in one tensor, gates and what they gate taking turns, as gpt-oss stores them."""
    experts, hidden, width = 4, 64, 128
    generator = torch.Generator().manual_seed(0)
    target, group = Target("cpu", quantization="stored"), ParallelGroup()
    layout = "interleaved_columns"
    gate_up = GroupedGateUp(
        experts, hidden, width, "clamped_swiglu", bias=bias, layout=layout, target=target, group=group
    )
    down = GroupedDown(experts, width, hidden, bias=bias, layout=layout, target=target, group=group)
    weights, biases = [], []
    for layer, rows, columns in ((gate_up, 2 * width, hidden), (down, hidden, width)):
        matrices = [round_to_mxfp4(torch.randn(rows, columns, generator=generator)) for _ in range(experts)]
        tensors = {role: torch.stack([each.tensors[role] for each in matrices]) for role in matrices[0].tensors}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PackedWeights, "serves", lambda self, target: True)
            layer.allocate("experts", {("weight", None): MXFP4})
        layer.load("weight", None, StoredMatrix(MXFP4, (experts, rows, columns), tensors))
        values = torch.randn(experts, rows, generator=generator)
        if bias:
            layer.load("bias", None, values)
        layer.finish()
        assert isinstance(layer.method, PackedWeightGrouped)
        assert layer.planned_bytes({("weight", None): MXFP4}) == layer.method.num_bytes
        turns = torch.arange(rows) if layer is down else torch.arange(rows).view(-1, 2).t().flatten()
        weights.append(torch.stack([each.tensor() for each in matrices])[:, turns])
        biases.append(values[:, turns] if bias else None)
    x = torch.randn(5, hidden, generator=generator)
    ids = torch.rand(5, experts, generator=generator).argsort(-1)[:, :2].int()
    shares = torch.rand(5, 2, generator=generator)
    expected = sparse_mlp(x, ids, shares, weights[0], biases[0], weights[1], biases[1], "clamped_swiglu", False)[0]
    joined = gate_up.method.joined(down.method, "clamped_swiglu", False)
    assert joined is not None
    torch.testing.assert_close(joined(x, ids, shares), expected)
    torch.testing.assert_close(down(gate_up(x, ids), ids, shares), expected)


def test_cuda_keeps_quantized_weights_unasked() -> None:
    target = Target("cuda", torch.bfloat16)
    assert isinstance(choose_quantization(target), PackedWeights)
    with pytest.raises(ConfigError, match=r"activations is 'int8' but weights are kept by 'stored'"):
        choose_quantization(replace(target, activations="int8"))


NVFP4 = Scheme(
    "E2M1",
    packing=Packing(torch.uint8, (0, 1)),
    scales=ScaleGrid(1, 16, torch.float8_e4m3fn),
    second_scale="divides",
    roles=(*ROLES, ("second_scale", "g")),
)
FP8_BLOCKS = Scheme("E4M3", scales=ScaleGrid(128, 128, torch.float32), activations="per_group", roles=ROLES)
FP8_MATRIX = Scheme("E4M3", scales=ScaleGrid(None, None, torch.float32), roles=ROLES)
ROW_SCALES = Scheme("INT8", scales=ScaleGrid(1, None, torch.float32), roles=ROLES)


def eight_bits(kind: Scheme, rows: int, seed: int) -> StoredMatrix:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, WIDTH, generator=generator)
    assert kind.scales is not None
    groups = tuple(
        1 if side is None else -(-size // side)
        for size, side in zip((rows, WIDTH), (kind.scales.rows, kind.scales.columns), strict=True)
    )
    scales = torch.rand(groups, generator=generator)
    codes = values.to(torch.float8_e4m3fn) if kind.element == "E4M3" else (values * 40).to(torch.int8)
    return StoredMatrix(kind, (rows, WIDTH), {"weight": codes, "scales": scales})


def nvfp4(rows: int, seed: int) -> StoredMatrix:
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[Role, Tensor] = {
        "weight": torch.randint(0, 256, (rows, WIDTH // 2), generator=generator, dtype=torch.uint8),
        "scales": torch.rand(rows, WIDTH // 16, generator=generator).to(torch.float8_e4m3fn),
        "second_scale": torch.tensor([3.0 + seed]),
    }
    return StoredMatrix(NVFP4, (rows, WIDTH), tensors)


@pytest.mark.parametrize(
    ("make", "bits"),
    [
        (nvfp4, 4.5 + 32 / WIDTH),
        (lambda rows, seed: eight_bits(FP8_BLOCKS, rows, seed), 8.25),
        (lambda rows, seed: eight_bits(FP8_MATRIX, rows, seed), 8 + 32 / WIDTH),
        (lambda rows, seed: eight_bits(ROW_SCALES, rows, seed), 8 + 32 / WIDTH),
    ],
    ids=["nvfp4", "fp8 blocks", "fp8 with a scale for each piece", "int8"],
)
def test_floats_and_bytes_stay_packed(make: Callable[[int, int], StoredMatrix], bits: float) -> None:
    """Merged pieces keep second-level scales of their own."""
    pieces: list[Weight] = [make(128, 0), make(40, 1)]
    method, planned = linear(pieces)
    expected = torch.cat([piece.tensor() for piece in pieces if isinstance(piece, StoredMatrix)])
    torch.testing.assert_close(method.multiply(torch.eye(WIDTH)).t(), expected, rtol=1e-6, atol=0)
    assert method.num_bytes == planned == round(168 * WIDTH * bits / 8)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([eight_bits(FP8_BLOCKS, 256, 0), eight_bits(FP8_BLOCKS, 128, 1)], 128),
        ([eight_bits(FP8_BLOCKS, 128, 0), eight_bits(FP8_BLOCKS, 40, 1)], 8),
        ([rows_of(eight_bits(FP8_BLOCKS, 256, 0), torch.arange(256).flip(0)), eight_bits(FP8_BLOCKS, 128, 1)], 1),
        ([eight_bits(FP8_MATRIX, 96, 0), eight_bits(FP8_MATRIX, 64, 1)], 32),
        ([eight_bits(ROW_SCALES, 128, 0)], 1),
    ],
    ids=["blocks", "a piece of part of a block", "rows in another order", "a scale for each piece", "for each row"],
)
def test_rows_that_are_said_to_share_scales_do(pieces: list[Weight], expected: int) -> None:
    """Kernels read the scales of the first of them alone."""
    method, _ = linear(pieces)
    weight = method._store.weight
    assert weight.rows_per_scale == expected
    blocks = weight.scales.unflatten(1, (-1, expected))
    assert torch.equal(blocks, blocks[:, :, :1].expand_as(blocks))


@pytest.mark.parametrize("name", sorted(GGUF_SCHEMES))
def test_blocks_stay_packed_if_asked_for(name: str) -> None:
    data = k_blocks(name, 16, 512) if name.endswith("_K") else finite_blocks(name, 16, 512)
    if name in ("Q4_1", "Q5_1"):  # minima have to be numbers, too
        values = torch.randn(16, 512, generator=torch.Generator().manual_seed(0)).numpy()
        data = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])
    weight = StoredMatrix(GGUF_SCHEMES[name], (16, 512), {"weight": torch.from_numpy(data)})
    method, planned = linear([weight])
    assert torch.equal(method.multiply(torch.eye(512)).t(), weight.tensor())
    assert method.num_bytes == planned <= 16 * 512 * 12 / 8


def test_merged_blocks_of_different_types_become_bytes() -> None:
    weights: list[Weight] = [
        StoredMatrix(GGUF_SCHEMES[name], (16, 512), {"weight": torch.from_numpy(k_blocks(name, 16, 512))})
        for name in ("Q4_K", "Q6_K")
    ]
    method, planned = linear(weights)
    expected = torch.cat([weight.tensor() for weight in weights if isinstance(weight, StoredMatrix)])
    assert torch.equal(method.multiply(torch.eye(512)).t(), expected)
    assert (method.kept, method.num_bytes) == ("int8", planned)


def test_weights_that_are_no_numbers_are_refused() -> None:
    weight = eight_bits(FP8_BLOCKS, 128, 0)
    weight.tensors["weight"][3, 5] = float("nan")
    with pytest.raises(CheckpointError, match="fp8 weights that are no numbers"):
        linear([weight])


@needs_triton
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_unpacked_matrix_of_prompts_is_in_the_ledger(deterministic: bool) -> None:
    target = Target("cuda", torch.bfloat16, deterministic=deterministic)
    layer = MergedColumnParallelLinear(
        128, {"gate_proj": 64, "up_proj": 64}, bias=False, target=target, group=ParallelGroup()
    )
    layer.allocate("mlp", {("weight", name): SCHEMES["awq"] for name in ("gate_proj", "up_proj")})
    lines = list(layer.contributes(EngineSizes(1, 512, 512, 16, 100, 128, 2, 1.0)))
    assert [line.num_bytes for line in lines] == ([] if deterministic else [128 * 128 * 2])


@needs_triton
@pytest.mark.parametrize(("tokens", "deterministic", "unpacked"), [(512, False, 1), (64, False, 0), (512, True, 0)])
def test_unpacked_experts_of_long_prompts_are_in_the_ledger(tokens: int, deterministic: bool, unpacked: int) -> None:
    target = Target("cuda", torch.bfloat16, deterministic=deterministic)
    spec = MatrixSpec(64, (128,), False, target, "experts", "grouped", 4)
    method = choose_grouped(spec, [MXFP4] * 4)
    assert isinstance(method, PackedWeightGrouped)
    rows = tokens * 2 * (64 + 128) * 2
    assert method.workspace_bytes(tokens, 2) == rows + unpacked * 4 * 128 * 64 * 2
