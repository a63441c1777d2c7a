"""Every instruction set on numbers that are infinite, NaN, subnormal or huge, beside the torch references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quire.attention.base import AttentionSpec
from quire.attention.cpu_native import NativeAttention
from quire.kernels.cpu import ops
from quire.kernels.cpu.matrix import BLOCK_TYPES, STORAGES, Matmul, PackedMatrix
from quire.loader.gguf_quants import dequantize
from quire.ops import activation, norm, sample
from quire.ops.sample import sample_within
from quire.ops.scale import soft_cap
from tests.attention.test_cpu_native import native
from tests.attention.test_torch_ref import dense
from tests.kernels.cpu.isa import INSTRUCTION_SETS, each_instruction_set, examples, needs_library, using
from tests.kernels.cpu.test_matrix import CODED, allowed_error, inner_size, make, random_blocks

pytestmark = needs_library

NAN, INF = float("nan"), float("inf")
SPECIAL = (NAN, INF, -INF, 1e38, -1e38, 1e-45, -1e-40, -0.0, 0.0)
WIDTHS = (1, 7, 16, 33, 130)


def rows_with_special(rows: int, width: int, seed: int = 0) -> Tensor:
    """Ordinary numbers, and in every second row one of SPECIAL, each at some other place."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    for index in range(0, rows, 2):
        x[index, index * 5 % width] = SPECIAL[index // 2 % len(SPECIAL)]
    return x


def assert_same_kind(found: Tensor, expected: Tensor, scale: Tensor | float) -> None:
    """NaN and infinities in the same places, all else near."""
    expected = expected.float()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())
    assert torch.equal(found[found.isinf()], expected[expected.isinf()])
    finite = expected.isfinite()
    error = (found.double() - expected.double()).abs()
    allowed = torch.as_tensor(scale).double().expand_as(error) + 2e-6 * expected.double().abs()
    assert (error[finite] <= allowed[finite]).all()


@each_instruction_set
@pytest.mark.parametrize("kind", [*BLOCK_TYPES, *STORAGES])
@pytest.mark.parametrize("rows", [1, 19, 70])
def test_matmuls(isa: str, kind: str, rows: int) -> None:
    inner = inner_size(kind, 75)
    x = rows_with_special(rows, inner)
    with using(isa):
        matrix = make(kind, 37, inner, seed=1)
        found, weight = Matmul([matrix], None, "float32")(x), matrix.dequantize()
    expected = torch.nn.functional.linear(x.double(), weight.double())
    scale = 1e-6 * x.nan_to_num(0, 0, 0).double().norm(dim=1, keepdim=True) * weight.double().norm(dim=1)
    assert_same_kind(found, expected, scale)


@each_instruction_set
@pytest.mark.parametrize("kind", CODED)
@pytest.mark.parametrize(
    ("rows", "activations"), [(1, "int16"), (19, "int16"), (70, "int16"), (1, "int8"), (70, "int8")]
)
def test_matmuls_of_integers(isa: str, kind: str, rows: int, activations: str) -> None:
    """A row that is not finite has no scale: all its results are NaN. The others do not feel it."""
    inner = inner_size(kind, 75)
    x = rows_with_special(rows, inner)
    with using(isa):
        matrix = make(kind, 37, inner, seed=1)
        found, weight = Matmul([matrix], None, activations)(x), matrix.dequantize()
    finite = x.isfinite().all(1)
    assert found[~finite].isnan().all()
    expected = torch.nn.functional.linear(x[finite].double(), weight.double())
    # Below 2^-126 a scale cannot have an inverse, and numbers become zeros.
    scale = allowed_error(x[finite], weight, activations) + 2**-126 * weight.double().abs().sum(1)
    assert_same_kind(found[finite], expected, scale)


@each_instruction_set
@pytest.mark.parametrize("width", [*WIDTHS, 3000])
def test_scaling_and_soft_caps(isa: str, width: int) -> None:
    x = rows_with_special(40, width) * 20.0
    with using(isa, threads=2):
        scaled, capped = ops.scale(x, 0.3), ops.soft_cap(x, 30.0)
        factors, part = torch.rand(40, 1, 2), width // 2
        by_row = ops.scale_rows(x, factors, part)
        for start, end in ((0, 1), (7, 9), (11, 40)):
            assert_bits(ops.scale(x[start:end], 0.3), scaled[start:end])
            assert_bits(ops.soft_cap(x[start:end], 30.0), capped[start:end])
            assert_bits(ops.scale_rows(x[start:end], factors[start:end], part), by_row[start:end])
    assert_bits(by_row, torch.cat((x[:, :part] * factors[:, 0, :1], x[:, part:]), dim=1))
    assert_bits(scaled, x * 0.3)
    assert_same_kind(capped, soft_cap(x, 30.0), 1e-5)
    assert capped.nan_to_num(0.0).abs().max() <= 30.0


@each_instruction_set
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_are_picked_as_they_are(isa: str, width: int) -> None:
    x = rows_with_special(41, width)
    indices = torch.tensor([40, 0, 3, 3, 12] * 9)
    with using(isa, threads=2):
        assert_bits(ops.gather_rows(x, indices), x[indices])


@each_instruction_set
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_a_range_of_tokens(isa: str, width: int) -> None:
    x, ids, held = rows_with_special(41, width), torch.arange(41) * 3, (30, 40)
    inside = (ids >= 30) & (ids < 70)
    with using(isa, threads=2):
        assert torch.equal(ops.tokens_in_range(ids, *held), torch.where(inside, ids - 30, 0))
        cleared = ops.clear_outside_range(ids, x.clone(), *held)
        assert_bits(ops.take_columns(x, width // 2, 1), x[:, width // 2 : width // 2 + 1])
    assert_bits(cleared, torch.where(inside.unsqueeze(1), x, 0.0))


@each_instruction_set
@pytest.mark.parametrize("width", WIDTHS)
def test_columns_side_by_side_and_apart(isa: str, width: int) -> None:
    x, y = rows_with_special(41, width), rows_with_special(41, 3)
    with using(isa, threads=2):
        assert_bits(ops.join_columns(x, y), torch.cat((x, y), dim=1))
        apart = ops.spread_logits(x, torch.arange(width) + 1, 2 * width + 1)
    expected = torch.full((41, 2 * width + 1), -torch.inf)
    expected[:, 1::2] = x
    assert_bits(apart, expected)


@each_instruction_set
@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_not_finite_is_found_in_its_row(isa: str, width: int) -> None:
    x, out = rows_with_special(41, width), torch.zeros(41, dtype=torch.bool)
    beside = torch.cat([torch.full_like(x, NAN), x], dim=1)[:, width:]
    with using(isa, threads=2):
        NativeAttention().note_finite(beside, out)
    assert torch.equal(out, x.isfinite().all(-1))
    assert not out.all()
    assert out.any()


@each_instruction_set
@pytest.mark.parametrize("inner", WIDTHS)
def test_plain_matmuls(isa: str, inner: int) -> None:
    x, weight = rows_with_special(41, inner), torch.randn(23, inner, generator=torch.Generator().manual_seed(2))
    with using(isa):
        found = ops.linear_transposed(x, weight)
        assert_bits(ops.linear_transposed(x[13:29], weight), found[13:29])
    expected = torch.nn.functional.linear(x.double(), weight.double())
    scale = 1e-6 * x.nan_to_num(0, 0, 0).double().norm(dim=1, keepdim=True) * weight.double().norm(dim=1)
    assert_same_kind(found, expected, scale)


def assert_bits(found: Tensor, expected: Tensor) -> None:
    """Equal values, and NaN in the same places."""
    np.testing.assert_array_equal(found.numpy(), expected.numpy())


@each_instruction_set
@pytest.mark.parametrize("width", WIDTHS)
def test_gelu(isa: str, width: int) -> None:
    """Of infinity it may be NaN: neither is a finite value."""
    x = rows_with_special(40, width).nan_to_num(nan=torch.nan, posinf=1e4, neginf=-1e4)
    with using(isa):
        found = ops.gelu(x)
        for start, end in ((0, 1), (7, 9), (11, 40)):
            assert_bits(ops.gelu(x[start:end]), found[start:end])
    assert_same_kind(found, activation.gelu(x), 1e-5)


@each_instruction_set
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms(isa: str, width: int, offset: float) -> None:
    generator = torch.Generator().manual_seed(width)
    residual, weight = torch.randn(40, width, generator=generator), torch.randn(width, generator=generator)
    x = rows_with_special(40, width)
    x[1], x[3] = x[1] * 1e-25, x[3] * 1e15  # squares that vanish beside epsilon, and large ones
    residual[1], residual[3] = 0.0, 0.0
    with using(isa):
        alone = ops.rms_norm(x, weight, 1e-6, offset)
        found, total = ops.add_rms_norm(x, residual, weight, 1e-6, offset)
        for start, end in ((0, 1), (7, 9), (11, 40)):
            part = ops.add_rms_norm(x[start:end], residual[start:end], weight, 1e-6, offset)
            assert_bits(part[0], found[start:end])
            assert_bits(part[1], total[start:end])
            assert_bits(ops.rms_norm(x[start:end], weight, 1e-6, offset), alone[start:end])
    expected, expected_total = norm.add_rms_norm(x, residual, weight, 1e-6, offset)
    assert_bits(total, expected_total)
    assert_same_kind(found, expected, 1e-5)
    assert_same_kind(alone, norm.rms_norm(x, weight, 1e-6, offset), 1e-5)


@each_instruction_set
@pytest.mark.parametrize(
    ("run", "reference"),
    [(ops.silu_and_mul, activation.silu_and_mul), (ops.gelu_tanh_and_mul, activation.gelu_tanh_and_mul)],
    ids=["silu", "gelu"],
)
def test_activations(isa: str, run: object, reference: object) -> None:
    assert callable(run)
    assert callable(reference)
    gates = [NAN, INF, 1e38, -1e38, 200.0, -200.0, 88.4, -88.4, 87.0, -87.0, 10.0, -10.0, 1e-30, 1e-45, -1e-45, 0.0]
    gate = torch.tensor([gates + [float(i) / 3 - 5 for i in range(31)]])
    for up in (1.0, -3.0, 1e30, 0.0):
        x = torch.cat([gate, torch.full_like(gate, up)], dim=1).repeat(3, 1)
        with using(isa):
            found = run(x)
            assert_bits(run(x[1:2]), found[1:2])
        assert_same_kind(found, reference(x), 1e-36 * max(1.0, abs(up)))  # below which an activation may vanish


@each_instruction_set
@pytest.mark.parametrize("type", BLOCK_TYPES)
@examples(6)
@given(rows=st.integers(1, 40), blocks=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_any_blocks(isa: str, type: str, rows: int, blocks: int, seed: int) -> None:
    inner = blocks * BLOCK_TYPES[type][0]
    data = random_blocks(type, rows, inner, seed)  # with scales of any kind: infinite, NaN, subnormal
    with using(isa):
        found = PackedMatrix.from_blocks(type, data, inner).dequantize()
    assert_bits(found, dequantize(data.reshape(-1), type, (rows, inner)))


@each_instruction_set
@pytest.mark.parametrize("storage", STORAGES)
def test_floats_are_stored_alike(isa: str, storage: str) -> None:
    """Whatever the reference set makes of a matrix, its inner size odd, the others make too."""
    weight = torch.randn(21, 45, generator=torch.Generator().manual_seed(3)) * 1e-3
    weight[4, 7], weight[5, 44], weight[20, 0] = 1e-41, 60000.0, -60000.0
    with using("portable"):
        expected = PackedMatrix.from_float(weight, storage).dequantize()
    with using(isa):
        assert_bits(PackedMatrix.from_float(weight, storage).dequantize(), expected)


@each_instruction_set
@pytest.mark.parametrize("rotary", [2, 10, 32, 66])
def test_rotations_are_looked_up(isa: str, rotary: int) -> None:
    table = rows_with_special(50, rotary)
    positions = torch.tensor([49, 0, 7, 7, 12, 48, 1, 30, 3])
    with using(isa):
        cos, sin = ops.gather_rotation(table, positions, torch.float32)
        part = ops.gather_rotation(table, positions[4:6], torch.float32)
    half = rotary // 2
    chosen = table[positions].unsqueeze(1)
    assert_bits(cos, chosen[..., :half].repeat(1, 1, 2))
    assert_bits(sin, torch.cat([-chosen[..., half:], chosen[..., half:]], dim=-1))
    assert_bits(part[0], cos[4:6])
    assert_bits(part[1], sin[4:6])


@each_instruction_set
@pytest.mark.parametrize("size", [1, 15, 1000, 8200])
@pytest.mark.parametrize(
    "limits", [(-INF, 0, 1.0), (-2.0, 0, 1.0), (-INF, 3, 1.0), (-INF, 0, 0.7), (-9.0, 900, 0.999)]
)
def test_draws(isa: str, size: int, limits: tuple[float, float, float]) -> None:
    logits = rows_with_special(18, size, seed=5)
    logits[5, ::2], logits[5, -1] = -INF, 0.5
    seeds, positions = torch.arange(18), torch.arange(18) * 7
    parameters = torch.tensor([(0.9, *limits)] * 18, dtype=torch.float64).T.contiguous()
    parameters[0, 7] = 1e-3
    with using(isa, threads=2):
        found, highest = ops.sample_within(logits, parameters, seeds, positions)
        part = slice(5, 9)
        alone = ops.sample_within(logits[part], parameters[:, part], seeds[part], positions[part])
        ids, best = ops.first_max(logits)
    expected, expected_highest = sample_within(logits, parameters, seeds, positions)
    fine = expected_highest.isfinite()
    assert torch.equal(found[fine], expected[fine]), "a row that broke may have any token"
    assert ((found >= 0) & (found < size)).all()
    assert_bits(highest, expected_highest)
    assert torch.equal(alone[0], found[part])
    assert torch.equal(ids[~best.isnan()], sample.first_max(logits)[0][~best.isnan()])
    assert_bits(best, sample.first_max(logits)[1])


@each_instruction_set
@pytest.mark.parametrize("factor", [1e-30, 1e3, 1e15])
def test_attention_with_extreme_scores(isa: str, factor: float) -> None:
    """Scores so far apart that one key takes all, or so small that all are alike."""
    spec = AttentionSpec(3, 1, 37, 0.3)
    sequences = native(spec, [70, 9])
    for row in range(2):
        sequences.q[row] *= factor
    with using(isa):
        sequences.step({0: 69, 1: 9})
        sequences.step({0: 1})
    for row in range(2):
        expected = dense(spec, sequences.q[row], sequences.k[row], sequences.v[row])
        torch.testing.assert_close(sequences.out[row].double(), expected, atol=3e-3, rtol=1e-3)


@each_instruction_set
def test_attention_keeps_a_broken_sequence_to_itself(isa: str) -> None:
    spec = AttentionSpec(4, 2, 36, 0.2)
    for value in (NAN, INF):
        broken, clean = native(spec, [40, 80]), native(spec, [40, 80])
        broken.v[0][3] = value
        for run in (broken, clean):
            with using(isa):
                run.step({0: 3, 1: 79})
                run.step({0: 36})  # tokens of one step may share what they read, also what only later ones see
                run.step({1: 1, 0: 1})
        assert not broken.out[0][3:].isfinite().any()
        assert torch.equal(broken.out[0][:3], clean.out[0][:3])
        assert torch.equal(broken.out[1], clean.out[1])


def test_every_set_that_was_built_is_tried() -> None:
    assert INSTRUCTION_SETS[-1] == "portable"
