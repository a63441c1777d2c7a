"""Packed weights: every format gives what its values say, on every shard, in the bytes that were planned."""

from __future__ import annotations

from functools import partial

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels.cpu.library import unavailable
from quire.layers.embedding import HeadProjection, LMHead, TiedProjection, VocabParallelEmbedding
from quire.layers.linear import ColumnParallelLinear, Linear, QKVParallelLinear, RowParallelLinear
from quire.layers.quant.packed import PackedLinear, PackedTable
from quire.layers.scheme import F32, StoredMatrix, Weight, as_tensor, float_scheme, scheme_of
from quire.loader.gguf_quants import SCHEMES
from quire.ops.base import Target
from quire.parallel.groups import ParallelGroup
from quire.types.errors import ConfigError
from tests.loader.gguf_tiny import finite_blocks, k_blocks

pytestmark = pytest.mark.skipif(unavailable() is not None, reason="needs the native CPU library")

PACKED_TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
SPLIT_TYPES = sorted(SCHEMES.keys() - PACKED_TYPES)
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
INNER = 512
AUTO, INT8, INT4 = (Target(quantization=name) for name in ("auto", "int8", "int4"))
ONE = ParallelGroup()


def values(rows: int, seed: int = 0, inner: int = INNER) -> Tensor:
    return torch.randn(rows, inner, generator=torch.Generator().manual_seed(seed)) * 0.1


def make(format: str, rows: int, seed: int = 0) -> Weight:
    if format in FLOATS:
        return values(rows, seed).to(FLOATS[format])
    kind = gguf.GGMLQuantizationType[format]
    if format.endswith("_K"):
        data = k_blocks(format, rows, INNER)
    elif format in SPLIT_TYPES:
        data = finite_blocks(format, rows, INNER)
    else:
        data = gguf.quants.quantize(values(rows, seed).numpy(), kind)
    return StoredMatrix(SCHEMES[format], (rows, INNER), {"weight": torch.from_numpy(data)})


def assert_matmul(layer: Linear, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    torch.testing.assert_close(layer(x).double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("format", [*FLOATS, *PACKED_TYPES, *SPLIT_TYPES])
def test_every_format_multiplies_by_its_values_in_the_planned_bytes(format: str) -> None:
    weight, x, bias = make(format, 40), values(3, seed=1), values(1, seed=2, inner=40)[0]
    layer = ColumnParallelLinear(INNER, 40, bias=True, target=AUTO, group=ONE).allocate()
    planned = layer.planned_bytes({("weight", None): scheme_of(weight), ("bias", None): F32})
    layer.load("weight", None, weight)
    layer.load("bias", None, bias)
    layer.finish()
    assert isinstance(layer.method, PackedLinear)
    assert_matmul(layer, x, as_tensor(weight).float(), bias)
    assert torch.equal(layer.method.matrices[0].dequantize(), as_tensor(weight).float()), "no value changes"
    assert not layer.method.decodes(scheme_of(weight))
    assert layer.method.num_bytes == planned


def test_other_float_types_are_kept_or_quantized_from_their_values() -> None:
    weight, x = values(8).double(), values(2, seed=1)
    for target, tolerance in ((AUTO, 2e-5), (INT8, 2e-2)):
        layer = ColumnParallelLinear(INNER, 8, bias=False, target=target, group=ONE).allocate()
        planned = layer.planned_bytes({("weight", None): float_scheme(weight.dtype)})
        layer.load("weight", None, weight)
        layer.finish()
        assert layer.method.num_bytes == planned
        torch.testing.assert_close(layer(x), x @ weight.float().t(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("format", PACKED_TYPES)
def test_quantized_weights_take_little_more_than_their_blocks(format: str) -> None:
    weight = make(format, 64)
    assert isinstance(weight, StoredMatrix)
    layer = ColumnParallelLinear(INNER, 64, bias=False, target=AUTO, group=ONE).allocate()
    # Five and six bits are kept in eight, and the small scales of K formats are kept expanded.
    limit = {"Q4_K": 1.45, "Q5_0": 1.55, "Q5_1": 1.5, "Q5_K": 1.85, "Q6_K": 1.55}.get(format, 1.01)
    assert layer.planned_bytes({("weight", None): weight.scheme}) <= limit * weight.tensors["weight"].nbytes


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("formats", [("Q4_K", "Q4_K", "Q6_K"), ("Q8_0", "F16", "Q4_1")], ids="-".join)
def test_merged_pieces_may_differ_in_format(formats: tuple[str, str, str], size: int) -> None:
    heads, kv_heads, dim = 4, 2, 12
    q, k, v = (make(f, n * dim, i) for i, (f, n) in enumerate(zip(formats, (heads, kv_heads, kv_heads), strict=True)))
    x = values(5, seed=9)
    for rank in range(size):
        layer = QKVParallelLinear(
            INNER, heads, kv_heads, dim, bias=False, target=AUTO, group=ParallelGroup(rank, size)
        ).allocate()
        for name, weight in (("v_proj", v), ("q_proj", q), ("k_proj", k)):
            layer.load("weight", name, weight)
        layer.finish()
        mine, first_kv, kv = heads // size, rank * kv_heads // size, max(1, kv_heads // size)
        expected = [as_tensor(q).float().unflatten(0, (heads, dim))[rank * mine : (rank + 1) * mine]]
        expected += [as_tensor(w).float().unflatten(0, (kv_heads, dim))[first_kv : first_kv + kv] for w in (k, v)]
        assert_matmul(layer, x, torch.cat(expected).flatten(0, 1))
        planned = layer.planned_bytes(
            {
                ("weight", name): scheme_of(w)
                for name, w in zip(("q_proj", "k_proj", "v_proj"), (q, k, v), strict=True)
            }
        )
        assert layer.method.num_bytes == planned


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("format", ["Q4_1", "Q4_K", "BF16"])
def test_input_slices_stay_packed_where_they_cut_no_block(format: str, size: int) -> None:
    weight, x, total = make(format, 24), values(3, seed=1), torch.zeros(3, 24)
    share = INNER // size
    for rank in range(size):
        layer = RowParallelLinear(INNER, 24, bias=False, target=AUTO, group=ParallelGroup(rank, size)).allocate()
        planned = layer.planned_bytes({("weight", None): scheme_of(weight)})
        layer.load("weight", None, weight)
        layer.finish()
        assert isinstance(layer.method, PackedLinear)
        (matrix,) = layer.method.matrices
        # Blocks of Q4_K are 256 long: four ranks cut them, and their slices are decoded.
        assert (matrix.format == "float32") == (format == "Q4_K" and size == 4)
        assert layer.method.num_bytes == planned
        total += layer(x[:, rank * share : (rank + 1) * share])
    torch.testing.assert_close(total, x @ as_tensor(weight).float().t(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("format", ["F32", "BF16", "Q8_0", "Q6_K"])
@pytest.mark.parametrize("size", [1, 2])
def test_one_table_serves_lookups_and_the_tied_head(format: str, size: int) -> None:
    table, tokens, hidden = make(format, 48), torch.tensor([3, 47, 0, 24, 23]), values(2, seed=5)
    rows, logits = torch.zeros(5, INNER), []
    for rank in range(size):
        group = ParallelGroup(rank, size)
        embedding = VocabParallelEmbedding(48, INNER, target=AUTO, group=group).allocate()
        embedding.load("weight", None, table)
        embedding.finish()
        head = LMHead(TiedProjection(embedding), logit_divisor=None, logit_soft_cap=None, target=AUTO, group=group)
        assert isinstance(embedding.method, PackedTable)
        assert embedding.method.num_bytes == embedding.planned_bytes({("weight", None): scheme_of(table)})
        assert head.projection.method is embedding.method, "the table exists once"
        rows += embedding(tokens)
        logits.append(head(hidden))
    assert torch.equal(rows, as_tensor(table).float()[tokens])
    torch.testing.assert_close(torch.cat(logits, -1), hidden @ as_tensor(table).float().t(), atol=2e-5, rtol=2e-5)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    inner=st.sampled_from([32, 64, 96, 100]),
    spread=st.floats(1e-4, 30),
    shift=st.floats(-3, 3),
)
def test_quantizing_errs_by_half_a_step_at_most(seed: int, inner: int, spread: float, shift: float) -> None:
    weight = values(5, seed, inner) * spread + shift
    groups = torch.nn.functional.pad(weight, (0, -inner % 32), value=0.0).unflatten(1, (-1, 32))
    for target in (INT8, INT4):
        layer = ColumnParallelLinear(inner, 5, bias=False, target=target, group=ONE).allocate()
        layer.load("weight", None, weight)
        layer.finish()
        assert isinstance(layer.method, PackedLinear)
        error = (layer.method.matrices[0].dequantize() - weight).abs()
        largest = groups.abs().amax(-1)
        widest = groups.amax(-1).clamp_min(0) - groups.amin(-1).clamp_max(0)
        step = largest / 127 if target is INT8 else widest / 15
        # Scales and minima are float16: each is off by a 2^-11 of itself at most.
        bound = 0.5 * step + largest * 2**-9 + 1e-6
        assert (error <= bound.repeat_interleave(32, 1)[:, :inner]).all(), target.quantization


@pytest.mark.parametrize(("target", "bits", "error"), [(INT8, 8.5, 0.01), (INT4, 5.0, 0.11)])
def test_size_and_error_of_quantizing_while_loading(target: Target, bits: float, error: float) -> None:
    weight, x = values(64), values(16, seed=1)
    layer = ColumnParallelLinear(INNER, 64, bias=False, target=target, group=ONE).allocate()
    layer.load("weight", None, weight.bfloat16())
    layer.finish()
    expected = x @ weight.bfloat16().float().t()
    assert (layer(x) - expected).norm() / expected.norm() < error
    assert 8 * layer.planned_bytes({("weight", None): float_scheme(torch.bfloat16)}) / weight.numel() == bits


@pytest.mark.parametrize("make_layer", [partial(HeadProjection, bias=False), VocabParallelEmbedding])
def test_int4_keeps_tables_and_heads_in_eight_bits(make_layer: type) -> None:
    sizes = (INNER, 64) if isinstance(make_layer, partial) else (64, INNER)
    formats = {("weight", None): F32}
    four, eight = (
        make_layer(*sizes, target=target, group=ONE).allocate().planned_bytes(formats) for target in (INT4, INT8)
    )
    assert four == eight == 64 * INNER * 8.5 / 8


@pytest.mark.parametrize("target", [INT8, INT4])
def test_quantized_checkpoints_are_not_quantized_again(target: Target) -> None:
    layer = ColumnParallelLinear(INNER, 8, bias=False, target=target, group=ONE).allocate()
    for attempt in (
        lambda: layer.load("weight", None, make("Q4_1", 8)),
        lambda: layer.planned_bytes({("weight", None): SCHEMES["Q4_1"]}),
    ):
        with pytest.raises(
            ConfigError,
            match=r"quantization is 'int\d', .* quantized already .weights in it are Q4_1.; leave --quant",
        ):
            attempt()


def test_rows_do_not_depend_on_their_batch() -> None:
    layer = QKVParallelLinear(INNER, 4, 2, 12, bias=False, target=AUTO, group=ONE).allocate()
    for name, format, rows in (("q_proj", "Q4_K", 48), ("k_proj", "Q8_0", 24), ("v_proj", "BF16", 24)):
        layer.load("weight", name, make(format, rows))
    layer.finish()
    x = values(33, seed=3)
    whole = layer(x)
    for start, stop in ((0, 1), (32, 33), (5, 12), (1, 33)):
        assert torch.equal(layer(x[start:stop]), whole[start:stop])


def test_bytes_of_a_mapped_file_are_not_kept() -> None:
    weight = make("Q4_1", 16)
    assert isinstance(weight, StoredMatrix)
    layer = ColumnParallelLinear(INNER, 16, bias=False, target=AUTO, group=ONE).allocate()
    layer.load("weight", None, weight)
    expected = weight.tensor()
    weight.tensors["weight"].zero_()
    layer.finish()
    assert_matmul(layer, values(2), expected)
