"""The interpreter computes the same with the work left out that changes nothing; its matmuls add in one order."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from tests.kernels import interpreter
from tests.kernels.device import NATIVE
from tests.kernels.triton.paged import needs_triton

pytestmark = [needs_triton, pytest.mark.skipif(NATIVE, reason="kernels run on a GPU: nothing is interpreted")]


def test_it_is_hastened_and_only_once() -> None:
    """A red one tells that Triton's interpreter works otherwise now, and may need nothing of this."""
    from triton.runtime import interpreter as of_triton

    assert interpreter.hasten()
    patch = of_triton._patch_lang
    assert interpreter.hasten()
    assert of_triton._patch_lang is patch


def test_a_launch_leaves_the_language_as_it_was() -> None:
    import torch
    import triton.language as tl

    from quire.kernels.triton import norm

    assert interpreter.hasten()
    norm.rms_norm(torch.ones(2, 8), torch.ones(8), 1e-6)  # what functions that it calls replace, stays replaced
    before = dict(inspect.getmembers(tl)), dict(inspect.getmembers(tl.tensor))
    norm.rms_norm(torch.ones(2, 8), torch.ones(8), 1e-6)
    after = dict(inspect.getmembers(tl)), dict(inspect.getmembers(tl.tensor))
    assert after == before
    assert tl.core.is_builtin(tl.load)


def test_formats_are_those_of_triton() -> None:
    from triton.runtime import interpreter as of_triton

    tl = of_triton.tl
    dtypes = [tl.int1, tl.int32, tl.uint8, tl.int64, tl.float16, tl.bfloat16, tl.float32, tl.float8e4nv]
    wholes = [*dtypes, *(tl.pointer_type(dtype) for dtype in dtypes)]
    blocks = [tl.block_type(dtype, [4, 2]) for dtype in wholes]
    known = interpreter.known_formats(of_triton)
    assert [known(dtype).name for dtype in wholes] == [
        *("bool", "int32", "uint8", "int64", "float16", "uint16", "float32", "uint8"),
        *["uint64"] * len(dtypes),
    ]
    assert [known(dtype) for dtype in blocks] == [known(dtype) for dtype in wholes]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int8])
def test_a_matmul_has_the_bits_of_its_parts(dtype: type) -> None:
    """NumPy's libraries add in an order that follows the shape on some processors."""
    numbers = np.random.default_rng(0)
    a, b = (numbers.normal(size=size).astype(np.float32) * 16 for size in ((3, 33, 70), (3, 70, 48)))
    a, b = a.astype(dtype), b.astype(dtype)
    total = np.int32 if dtype is np.int8 else np.float32
    whole = interpreter.ordered_matmul(a, b, total)
    assert whole.dtype == total
    np.testing.assert_allclose(whole, a.astype(np.float64) @ b.astype(np.float64), rtol=1e-4, atol=1e-2)
    for rows, columns in ((1, 1), (7, 48), (33, 16)):
        some = interpreter.ordered_matmul(a[0, -rows:], b[0, :, :columns], total)
        assert np.array_equal(some, whole[0, -rows:, :columns])


def test_kernels_multiply_in_that_order() -> None:
    from triton.runtime import interpreter as of_triton

    assert interpreter.hasten()
    builder, tl = of_triton.interpreter_builder, of_triton.tl
    numbers = np.random.default_rng(0)
    a, b = (of_triton.TensorHandle(numbers.normal(size=(64, 64)).astype(np.float32), tl.float32) for _ in range(2))
    nothing = of_triton.TensorHandle(np.zeros((64, 64), np.float32), tl.float32)
    found = builder.create_dot(a, b, nothing, None, None).data
    assert np.array_equal(found, interpreter.ordered_matmul(a.data, b.data, np.float32))
