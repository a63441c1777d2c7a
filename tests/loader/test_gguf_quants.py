from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.loader import gguf_quants
from quire.loader.gguf_quants import SUPPORTED_TYPES, decoded_dtype, dequantize

BLOCK_TYPES = [name for name in SUPPORTED_TYPES if name not in gguf_quants.FLOAT_TYPES]


def random_blocks(name: str, num_blocks: int, seed: int) -> np.ndarray:
    _, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    return np.random.default_rng(seed).integers(0, 256, num_blocks * num_bytes, dtype=np.uint8)


def assert_same(found: torch.Tensor, expected: np.ndarray) -> None:
    """Equal to the last bit; random scales are sometimes NaN, which must then be NaN in both."""
    np.testing.assert_array_equal(found.float().numpy(), expected)


def test_the_required_types_are_supported() -> None:
    """Every type that gguf-py decodes."""
    assert {kind.name for kind in gguf.quants._type_traits} | {"F32", "F16"} == set(SUPPORTED_TYPES)


@pytest.mark.parametrize("name", SUPPORTED_TYPES)
@settings(max_examples=15, deadline=None)
@given(num_rows=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
def test_any_bytes_decode_as_gguf_py_decodes_them(name: str, num_rows: int, seed: int) -> None:
    kind = gguf.GGMLQuantizationType[name]
    values_per_block = gguf.GGML_QUANT_SIZES[kind][0]
    per_row = 2 if values_per_block > 1 else 7
    data = random_blocks(name, num_rows * per_row, seed)
    shape = (num_rows, per_row * values_per_block)
    with np.errstate(all="ignore"):
        stored = data.view(np.float32 if name == "F32" else np.float16) if name in ("F32", "F16") else data
        expected = gguf.quants.dequantize(stored.reshape(num_rows, -1), kind)
    found = dequantize(data, name, shape)
    assert found.shape == shape
    assert found.dtype == decoded_dtype(name)
    assert_same(found, expected.reshape(shape))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_decoding_in_chunks_changes_nothing(name: str) -> None:
    values_per_block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][0]
    data, shape = random_blocks(name, 7, seed=1), (7, values_per_block)
    whole = dequantize(data, name, shape)
    assert_same(dequantize(data, name, shape, chunk=2 * values_per_block), whole.numpy())


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_values_come_back_close(name: str) -> None:
    values = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name]).reshape(-1)
    error = np.abs(dequantize(data, name, values.shape).numpy() - values)
    assert error.max() < {"Q8_0": 0.02, "Q5_0": 0.2, "Q5_1": 0.15}.get(name, 0.4)


def test_the_result_may_be_written_to_even_if_the_bytes_may_not() -> None:
    data = np.arange(8, dtype=np.float32).view(np.uint8)
    data.flags.writeable = False
    result = dequantize(data, "F32", (2, 4))
    result += 1
    assert result.flatten().tolist() == list(range(1, 9))
    assert data.view(np.float32).tolist() == list(range(8))
