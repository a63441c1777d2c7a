"""Packed matrices: exact values, matmuls independent of the batch to the last bit, bounded quantization."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.cpu import library
from quire.kernels.cpu.matrix import BLOCK_TYPES, FORMATS, STORAGES, Arena, Matmul, PackedMatrix, packed_bytes
from quire.layers.scheme import TABLES
from quire.loader.gguf_quants import dequantize
from quire.types.errors import CheckpointError, ConfigError
from tests.kernels.cpu.isa import examples

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason="needs a C++ compiler")

GROUPS = {
    **{"code4_min_f32": 32, "code8_min_f32": 32, "code8_f32": 16, "code8_32": 32, "code4_min_16": 16},
    **{"e2m1": 32, "e2m1_16": 16, "nf4": 32, "fp4": 32, "e4m3": 32, "e5m2": 32},
}
KINDS = (*BLOCK_TYPES, *STORAGES, *GROUPS)
# Weights that rows of integers can be multiplied with.
CODED = (*BLOCK_TYPES, "int8", "int4", "code4_min_f32", "code8_min_f32", "code8_f32", "code8_32", "e2m1", "e2m1_16")
ARITHMETIC = [*((kind, "float32") for kind in KINDS), *((kind, bits) for kind in CODED for bits in ("int16", "int8"))]


def random_blocks(type: str, rows: int, inner: int, seed: int) -> NDArray[np.uint8]:
    values, num_bytes, _ = BLOCK_TYPES[type]
    return np.random.default_rng(seed).integers(0, 256, (rows, inner // values * num_bytes), dtype=np.uint8)


def sane_blocks(type: str, rows: int, inner: int, seed: int) -> NDArray[np.uint8]:
    """Random codes with scales as a quantizer would choose them."""
    generator = np.random.default_rng(seed)
    data = random_blocks(type, rows, inner, seed)
    values, num_bytes, _ = BLOCK_TYPES[type]
    blocks = data.reshape(rows, -1, num_bytes)
    halves = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(type, (0,))
    for start in halves:
        scales = (generator.standard_normal(blocks.shape[:2]) / values).astype(np.float16)
        blocks[:, :, start : start + 2] = scales[..., None].view(np.uint8)
    return data


def parts(kind: str, rows: int, inner: int, seed: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, scales and minima of a format that has no packer of its own."""
    generator = torch.Generator().manual_seed(seed)
    grid = (rows, -(-inner // GROUPS[kind]))
    scales, minima = torch.rand(grid, generator=generator), torch.randn(grid, generator=generator)
    if kind in ("e4m3", "e5m2"):
        floats = torch.float8_e4m3fn if kind == "e4m3" else torch.float8_e5m2
        return torch.randn(rows, inner, generator=generator).to(floats), scales, None
    low, high = (-128, 128) if kind.startswith("code8") else (0, 16)
    codes = torch.randint(low, high, (rows, inner), generator=generator)
    return codes, scales, minima if "_min" in kind else None


@pytest.mark.parametrize("kind", GROUPS)
def test_codes_keep_their_values(kind: str) -> None:
    codes, scales, minima = parts(kind, 37, 100, 3)
    tables = {"e2m1": "E2M1", "e2m1_16": "E2M1", "nf4": "NF4", "fp4": "FP4"}
    values = torch.tensor(TABLES[tables[kind]])[codes] if kind in tables else codes.float()
    values = values * (2 if kind.startswith("e2m1") else 1)
    spread = [None if grid is None else grid.repeat_interleave(GROUPS[kind], 1)[:, :100] for grid in (scales, minima)]
    assert spread[0] is not None
    expected = values.double() * spread[0].double() + (0 if spread[1] is None else spread[1].double())
    assert torch.equal(make(kind, 37, 100, 3).dequantize(), expected.float())


def make(kind: str, rows: int, inner: int, seed: int) -> PackedMatrix:
    if kind in BLOCK_TYPES:
        return PackedMatrix.from_blocks(kind, sane_blocks(kind, rows, inner, seed), inner)
    if kind in GROUPS:
        return PackedMatrix.from_codes(kind, *parts(kind, rows, inner, seed))
    return PackedMatrix.from_float(torch.randn(rows, inner, generator=torch.Generator().manual_seed(seed)), kind)


def inner_size(kind: str, wanted: int) -> int:
    """The next size that the kind can have."""
    unit = BLOCK_TYPES[kind][0] if kind in BLOCK_TYPES else 1
    return -(-wanted // unit) * unit


def allowed_error(x: Tensor, weight: Tensor, activations: str) -> Tensor:
    """Of x @ weight.T, float64 [rows, outputs]: what rounding sums costs, and for integers what rounding x costs."""
    x, weight = x.double(), weight.double()
    allowed = 1e-6 * x.norm(dim=1, keepdim=True) * weight.norm(dim=1)
    if activations != "float32":
        for block, weights in zip(x.split(32, dim=1), weight.split(32, dim=1), strict=True):
            half_a_step = block.abs().amax(1, keepdim=True) / {"int16": 32767, "int8": 127}[activations] / 2
            allowed += 1.001 * half_a_step * weights.abs().sum(1)
    return allowed


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Equal values, and NaN in the same places."""
    np.testing.assert_array_equal(found.numpy(), expected.numpy())


# ---- values


@pytest.mark.parametrize("type", BLOCK_TYPES)
@examples(12)
@given(rows=st.integers(1, 40), blocks=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_any_blocks_keep_their_values(type: str, rows: int, blocks: int, seed: int) -> None:
    inner = blocks * BLOCK_TYPES[type][0]
    data = random_blocks(type, rows, inner, seed)  # with scales of any kind: infinite, NaN, subnormal
    matrix = PackedMatrix.from_blocks(type, data, inner)
    assert_same(matrix.dequantize(), dequantize(data.reshape(-1), type, (rows, inner)))
    assert (matrix.rows, matrix.inner) == (rows, inner)
    assert matrix.num_bytes == packed_bytes(type, rows, inner)


@pytest.mark.parametrize(("type", "bits"), [("Q4_K", 4.625), ("Q5_K", 8.625), ("Q6_K", 8.5625)])
def test_integer_scales_stay_integers(type: str, bits: float) -> None:
    """As float32 they took 6 and 10 bits a weight, which decode reads once a token."""
    assert packed_bytes(type, 64, 1024) == 64 * 1024 * bits / 8


@pytest.mark.parametrize("type", BLOCK_TYPES)
def test_blocks_may_be_rows_of_a_larger_array(type: str) -> None:
    inner = 512
    data = sane_blocks(type, 40, inner, seed=3)
    whole = PackedMatrix.from_blocks(type, data, inner).dequantize()
    assert torch.equal(PackedMatrix.from_blocks(type, data[7:30:2], inner).dequantize(), whole[7:30:2])
    half = PackedMatrix.from_blocks(type, data[:, : data.shape[1] // 2], inner // 2)
    assert torch.equal(half.dequantize(), whole[:, : inner // 2])


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_floats_are_rounded_as_torch_rounds_them(storage: str, dtype: torch.dtype) -> None:
    bits = torch.from_numpy(np.random.default_rng(0).integers(0, 2**32, (19, 37), dtype=np.uint32).view(np.float32))
    special = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 65504.0, 65519.9, 65520.0, 1e-8, 5.97e-8, 6.1e-5]
    bits[0, : len(special)] = torch.tensor(special)
    bits[1] = torch.randn(37)
    weight = bits.to(dtype)
    expected = weight.float().to(getattr(torch, storage)).float()
    assert_same(PackedMatrix.from_float(weight, storage).dequantize(), expected)
    assert_same(PackedMatrix.from_float(weight.t(), storage).dequantize(), expected.t())


@pytest.mark.parametrize(("storage", "levels"), [("int8", 254), ("int4", 15)])
@examples(40)
@given(
    rows=st.integers(1, 33),
    inner=st.integers(1, 100),
    exponent=st.integers(-12, 3),
    offset=st.floats(-3, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_quantization_errs_by_half_a_step_at_most(
    storage: str, levels: int, rows: int, inner: int, exponent: int, offset: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(rows, inner, generator=generator) + offset) * 10.0**exponent
    found = PackedMatrix.from_float(weight, storage).dequantize()
    for start in range(0, inner, 32):
        group, error = weight[:, start : start + 32], (found - weight)[:, start : start + 32].abs().amax(1)
        low, high = group.amin(1), group.amax(1)
        span = 2 * group.abs().amax(1) if storage == "int8" else high - low
        # Scale and minimum are float16, rounded outwards: by 2^-10 of themselves, or 2^-24 where they are subnormal.
        step = (span + low.abs() * 2**-10 + 2**-24) / levels * (1 + 2**-10) + 2**-24
        assert (error <= step / 2 * 1.0001).all()


@pytest.mark.parametrize("storage", ["int8", "int4"])
def test_quantizing_what_is_quantized_changes_nothing_much(storage: str) -> None:
    constant = torch.full((3, 64), 0.5)
    assert torch.equal(PackedMatrix.from_float(torch.zeros(3, 64), storage).dequantize(), torch.zeros(3, 64))
    torch.testing.assert_close(PackedMatrix.from_float(constant, storage).dequantize(), constant, rtol=1e-3, atol=0)


@pytest.mark.parametrize("storage", ["int8", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_what_cannot_be_quantized_is_refused(storage: str, value: float) -> None:
    weight = torch.randn(20, 70)
    weight[17, 65] = value
    with pytest.raises(CheckpointError, match=rf"row 17 .*{storage}.*float32"):
        PackedMatrix.from_float(weight, storage)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ConfigError, match="Q2_K"):
        PackedMatrix.from_blocks("Q2_K", np.zeros((1, 84), np.uint8), 256)
    with pytest.raises(ConfigError, match="int3"):
        PackedMatrix.from_float(torch.zeros(1, 1), "int3")
    with pytest.raises(CheckpointError, match="19 bytes"):
        PackedMatrix.from_blocks("Q4_0", np.zeros((1, 19), np.uint8), 32)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_looked_up(kind: str) -> None:
    matrix = make(kind, 50, inner_size(kind, 70), seed=1)
    ids = torch.tensor([49, 0, 17, 17, 31, 48])
    assert torch.equal(matrix.embed(ids), matrix.dequantize()[ids])
    out = torch.empty(6, matrix.inner)
    assert matrix.embed(ids, out) is out
    assert matrix.embed(ids[:0]).shape == (0, matrix.inner)


def test_every_format_is_made_by_some_kind() -> None:
    assert {make(kind, 1, inner_size(kind, 1), 0).format for kind in KINDS} == set(FORMATS)


def test_memory_for_panels_is_aligned_apart_and_lives_as_long_as_its_tensor() -> None:
    arena = Arena()
    sizes = [1, 64, 100, 3 << 20, Arena.CHUNK, 70, Arena.CHUNK + 1, 0, 5000]
    tensors = [arena.allocate(size) for size in sizes]
    for value, (size, tensor) in enumerate(zip(sizes, tensors, strict=True)):
        assert tensor.shape == (size,)
        assert tensor.data_ptr() % 64 == 0
        tensor[:4096] = value
    del arena
    assert all((tensor[:4096] == value).all() for value, tensor in enumerate(tensors))


# ---- matmuls


@pytest.mark.parametrize(("kind", "activations"), ARITHMETIC)
@examples(25)
@given(
    rows=st.integers(0, 70),
    inner=st.integers(1, 900),
    outputs=st.integers(1, 200),
    start=st.integers(0, 69),
    bias=st.booleans(),
)
def test_a_row_has_the_same_bits_in_any_batch(
    kind: str, activations: str, rows: int, inner: int, outputs: int, start: int, bias: bool
) -> None:
    inner = inner_size(kind, inner)
    matrix, generator = make(kind, outputs, inner, seed=outputs), torch.Generator().manual_seed(inner)
    x = torch.randn(140, inner, generator=generator)
    added = torch.randn(outputs, generator=generator) if bias else None
    matmul = Matmul([matrix], added, activations)
    assert matmul.activations == activations
    whole = matmul(x)
    expected = torch.nn.functional.linear(
        x.double(), matrix.dequantize().double(), None if added is None else added.double()
    )
    allowed = allowed_error(x, matrix.dequantize(), activations)
    assert ((whole - expected).abs() <= allowed + 1e-6 * expected.abs()).all()
    assert torch.equal(matmul(x[start : start + rows]), whole[start : start + rows])


@pytest.mark.parametrize(("kind", "activations"), ARITHMETIC)
def test_every_batch_size_to_64_gives_the_same_bits(kind: str, activations: str) -> None:
    inner = inner_size(kind, 300)
    matmul = Matmul([make(kind, 75, inner, seed=2)], None, activations)
    x = torch.randn(64, inner)
    whole = matmul(x)
    for rows in range(1, 65):
        assert torch.equal(matmul(x[-rows:]), whole[-rows:])


@pytest.mark.parametrize("activations", ["float32", "int16", "int8"])
@pytest.mark.parametrize(("rows", "inner"), [(600, 200), (470, 9001)], ids=["chunks", "parts"])
def test_many_rows_give_the_same_bits_as_few(rows: int, inner: int, activations: str) -> None:
    matmul = Matmul([PackedMatrix.from_float(torch.randn(35, inner), "int4")], torch.randn(35), activations)
    x = torch.randn(rows, inner)
    whole = matmul(x)
    for start, end in ((0, 1), (rows - 1, rows), (rows // 2 - 3, rows // 2 + 3), (rows // 2 - 50, rows // 2 + 20)):
        assert torch.equal(matmul(x[start:end]), whole[start:end])


def test_each_element_is_summed_from_the_first_to_the_last() -> None:
    """The order is part of the meaning: it is what makes every path, and every processor, agree."""
    x, weight = torch.randn(9, 700), torch.randn(40, 700)
    total = torch.zeros(9, 40, dtype=torch.float64)
    for k in range(700):
        total = (total + x[:, k, None].double() * weight[:, k].double()).float().double()
    found = Matmul([PackedMatrix.from_float(weight)])(x)
    # In float64 product and sum are rounded once more than by a fused multiply-add, which shows very rarely.
    assert (found == total.float()).float().mean() > 0.99
    assert torch.equal(found[:1], Matmul([PackedMatrix.from_float(weight)])(x[:1]))


def test_integers_are_summed_exactly_and_groups_from_the_first_to_the_last() -> None:
    """Written out: a scale for each 32 elements of a row, whole numbers, one fused multiply-add for each group."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 100, generator=generator)
    matrix = PackedMatrix.from_float(torch.randn(40, 100, generator=generator), "int8")
    weight, total = matrix.dequantize(), torch.zeros(7, 40)
    for rows, weights in zip(x.split(32, dim=1), weight.split(32, dim=1), strict=True):
        step = rows.abs().amax(1, keepdim=True) * (1 / torch.tensor(32767.0))
        scale = weights.abs().amax(1) / 127  # of codes, which reach 127 at the largest
        codes = (weights / scale[:, None]).round()
        sums = ((rows / step).round().double() @ codes.double().T).float()
        total = (total.double() + (sums * (weights / codes).nan_to_num().amax(1)).double() * step.double()).float()
    torch.testing.assert_close(Matmul([matrix], None, "int16")(x), total, rtol=1e-6, atol=1e-5)


def test_float_weights_are_multiplied_as_floats_whatever_is_asked() -> None:
    x, weight = torch.randn(5, 64), torch.randn(20, 64)
    for storage in ("float32", "bfloat16", "float16"):
        matrix = PackedMatrix.from_float(weight, storage)
        matmul = Matmul([matrix], None, "int16")
        assert matmul.activations == "float32"
        assert torch.equal(matmul(x), Matmul([matrix], None, "float32")(x))
    mixed = [PackedMatrix.from_float(weight, "int8"), PackedMatrix.from_float(weight, "bfloat16")]
    assert Matmul(mixed, None, "int16").activations == "float32"


def test_integers_are_chosen_where_the_processor_has_instructions_for_them() -> None:
    loaded = library.load()
    assert loaded is not None
    matrix, before = PackedMatrix.from_float(torch.randn(20, 64), "int8"), loaded.instruction_set
    try:
        for name in loaded.instruction_sets:
            loaded.select(name)
            assert Matmul([matrix]).activations == ("int16" if name == "avx512vnni" else "float32")
    finally:
        loaded.select(before)


@pytest.mark.parametrize("activations", ["int16", "int8"])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_matrices_of_any_formats_are_multiplied_side_by_side(rows: int, activations: str) -> None:
    sizes = {"Q4_1": 40, "Q8_0": 7, "Q4_K": 16, "float32": 33, "int4": 100, "Q6_K": 1, "bfloat16": 64}
    matrices = [make(kind, size, 512, seed=size) for kind, size in sizes.items()]
    x, bias = torch.randn(rows, 512), torch.randn(sum(sizes.values()))
    whole = Matmul(matrices, bias)(x)
    parts = torch.cat([Matmul([matrix], None, "float32")(x) for matrix in matrices], dim=1)
    assert torch.equal(whole, parts + bias)
    coded = [matrix for matrix in matrices if matrix.format.startswith("code")]
    whole = Matmul(coded, None, activations)(x)
    assert torch.equal(whole, torch.cat([Matmul([matrix], None, activations)(x) for matrix in coded], dim=1))


@pytest.mark.parametrize("rows", [1, 30])
def test_rows_of_x_may_lie_apart(rows: int) -> None:
    matmul = Matmul([make("Q4_1", 32, 64, seed=0)])
    x = torch.randn(rows, 200)
    assert torch.equal(matmul(x[:, 5:69]), matmul(x[:, 5:69].contiguous()))


@pytest.mark.parametrize("rows", [1, 2, 20])
@pytest.mark.parametrize("storage", ["float32", "bfloat16", "float16"])
def test_extreme_values_are_passed_on(rows: int, storage: str) -> None:
    inner = 70
    weight, x = torch.zeros(20, inner), torch.zeros(rows, inner)
    weight[:, 3], weight[2, 69] = 1.0, float("inf")
    weight[5, 4], weight[6, 0] = float("nan"), 1e-7
    x[:, 3], x[:, 69], x[:, 0] = 3e38, 1.0, 1e-40
    matmul = Matmul([PackedMatrix.from_float(weight, storage)])
    out = matmul(x)
    expected = torch.full((rows, 20), 3e38)
    expected[:, 2], expected[:, 5] = float("inf"), float("nan")
    assert_same(out, expected)
    x[:, 3] = 0
    assert (matmul(x)[:, 6] == x[:, 0] * PackedMatrix.from_float(weight, storage).dequantize()[6, 0]).all()
    x[0, 69] = float("nan")
    out = matmul(x)
    assert out[0].isnan().all()
    assert not out[1:, [0, 1, 3]].isnan().any()


@pytest.mark.parametrize(("kind", "activations"), ARITHMETIC)
def test_every_instruction_set_gives_the_same_bits(kind: str, activations: str) -> None:
    loaded = library.load()
    assert loaded is not None
    before, results = loaded.instruction_set, []
    inner = inner_size(kind, 576)
    x = torch.randn(61, inner)  # packed for all of them
    try:
        for name in loaded.instruction_sets:
            loaded.select(name)
            matrix = make(kind, 90, inner, seed=4)
            matmul = Matmul([matrix], None, activations)
            results.append(torch.cat([matmul(x[:rows]) for rows in (61, 20, 3, 1)]))
    finally:
        loaded.select(before)
    assert all(torch.equal(result, results[0]) for result in results)


def test_gguf_py_agrees_about_block_sizes() -> None:
    for name, (values, num_bytes, _) in BLOCK_TYPES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (values, num_bytes)
