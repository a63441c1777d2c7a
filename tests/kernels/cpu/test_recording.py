"""Recorded kernel calls: a replay computes what the calls did, from whatever is in the inputs by then."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.cpu import library, ops
from quire.kernels.cpu.matrix import PackedMatrix, Product
from quire.kernels.cpu.recording import KernelRecorder
from quire.platform.recording import NotRecordableError

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C++ compiler")

WIDTH, DEPTH = 64, 12
NORM = torch.ones(WIDTH)


def layers() -> list[Product]:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(2 * WIDTH, WIDTH, generator=generator) / 8 for _ in range(DEPTH)]
    return [Product([PackedMatrix.from_float(weight, "int8")]) for weight in weights]


def chain(x: Tensor, products: list[Product]) -> Tensor:
    """A residual stream through products, activations and norms, as a model has it."""
    residual = x
    for product in products:
        x, residual = ops.add_rms_norm(ops.silu_and_mul(product(x)), residual, NORM, 1e-5)
    return x


@pytest.mark.parametrize("rows", [1, 5])
def test_a_replay_reads_the_inputs_anew(rows: int) -> None:
    products, x = layers(), torch.randn(rows, WIDTH)
    replay, out = KernelRecorder().record(lambda: chain(x, products))
    for seed in range(3):
        x.copy_(torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)))
        replay()
        assert torch.equal(out, chain(x, products))


def test_results_share_memory_when_they_are_not_needed_together() -> None:
    products, x = layers(), torch.randn(1, WIDTH)
    _, out = KernelRecorder().record(lambda: chain(x, products))
    one_layer = 4 * (2 * WIDTH + WIDTH + 2 * WIDTH)
    assert out.untyped_storage().nbytes() < 3 * one_layer + 1024


def test_kernels_are_called_as_before_after_a_recording() -> None:
    products, x = layers(), torch.randn(2, WIDTH)
    before = dict(vars(library.bound()))
    KernelRecorder().record(lambda: chain(x, products))
    assert dict(vars(library.bound())) == before


def test_a_failing_step_leaves_no_recorder_behind() -> None:
    before = dict(vars(library.bound()))

    def fail() -> Tensor:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        KernelRecorder().record(fail)
    assert dict(vars(library.bound())) == before


def test_a_result_that_no_kernel_made_is_refused() -> None:
    products, x = layers(), torch.randn(1, WIDTH)
    with pytest.raises(NotRecordableError, match="result"):
        KernelRecorder().record(lambda: chain(x, products) + 1)


def test_numbers_of_every_kind_reach_the_kernels() -> None:
    """A null pointer, a pointer, integers and floats."""
    x, weight = torch.randn(3, WIDTH), torch.randn(WIDTH)
    replay, out = KernelRecorder().record(lambda: ops.rms_norm(x, weight, 1e-3, 0.75))
    x.mul_(-3)
    replay()
    assert torch.equal(out, ops.rms_norm(x, weight, 1e-3, 0.75))
