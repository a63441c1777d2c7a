"""Recorded kernel calls: a replay computes what the calls did, from whatever is in the inputs by then."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire.kernels.cpu import library, ops
from quire.kernels.cpu.matrix import Matmul, PackedMatrix
from quire.kernels.cpu.recording import KernelRecorder
from quire.kernels.cpu.tracing import empty
from quire.platform.recording import NotRecordableError

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C++ compiler")

WIDTH, DEPTH = 64, 12
NORM = torch.ones(WIDTH)


def layers() -> list[Matmul]:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(2 * WIDTH, WIDTH, generator=generator) / 8 for _ in range(DEPTH)]
    return [Matmul([PackedMatrix.from_float(weight, "int8")]) for weight in weights]


def chain(x: Tensor, matmuls: list[Matmul]) -> Tensor:
    """A residual stream through matmuls, activations and norms, as a model has it."""
    residual = x
    for matmul in matmuls:
        x, residual = ops.add_rms_norm(ops.silu_and_mul(matmul(x)), residual, NORM, 1e-5)
    return x


TRIALS = ((2,), (5,))
LIMIT = 40


def inputs(seed: int) -> Tensor:
    return torch.randn(LIMIT, WIDTH, generator=torch.Generator().manual_seed(seed))


def test_a_replay_reads_the_inputs_anew_at_any_size() -> None:
    matmuls, x = layers(), inputs(0)
    recording = KernelRecorder().record(lambda rows: [chain(x[:rows], matmuls)], TRIALS, (LIMIT,))
    (out,) = recording.results
    assert out.shape == (LIMIT, WIDTH)
    for seed, rows in enumerate((1, 2, 3, 7, 7, 16, LIMIT, 5)):
        x.copy_(inputs(seed))
        recording(rows)
        assert torch.equal(out[:rows], chain(x[:rows], matmuls))


def test_sizes_are_told_apart() -> None:
    """Two streams of different lengths that meet in no kernel, each with its own result."""
    matmuls, x, y = layers(), inputs(0), inputs(1)

    def step(rows: int, lines: int) -> list[Tensor]:
        return [chain(x[:rows], matmuls), chain(y[:lines], matmuls[:3])]

    recording = KernelRecorder().record(step, ((2, 1), (7, 3), (12, 2)), (LIMIT, 9))
    assert [len(result) for result in recording.results] == [LIMIT, 9]
    for sizes in ((1, 9), (LIMIT, 1), (9, 9)):
        recording(*sizes)
        for result, size, expected in zip(recording.results, sizes, step(*sizes), strict=True):
            assert torch.equal(result[:size], expected)


def test_results_share_memory_when_they_are_not_needed_together() -> None:
    matmuls, x = layers(), inputs(0)
    recording = KernelRecorder().record(lambda rows: [chain(x[:rows], matmuls)], TRIALS, (LIMIT,))
    one_layer = LIMIT * 4 * (2 * WIDTH + WIDTH + 2 * WIDTH)
    assert recording.num_bytes < 3 * one_layer + 1024


def test_kernels_of_another_thread_go_on_while_one_records() -> None:
    matmuls, x = layers(), inputs(0)
    expected = chain(x[:3], matmuls)
    found: list[Tensor] = []

    def step(rows: int) -> list[Tensor]:
        other = threading.Thread(target=lambda: found.append(chain(x[:3], matmuls)))
        other.start()
        other.join(30)
        return [chain(x[:rows], matmuls)]

    KernelRecorder().record(step, TRIALS, (LIMIT,))
    assert len(found) == len(TRIALS)
    assert all(torch.equal(one, expected) for one in found)


def test_a_failing_step_leaves_no_trace_behind() -> None:
    matmuls, x = layers(), inputs(0)
    expected = chain(x[:3], matmuls)

    def fail(rows: int) -> list[Tensor]:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        KernelRecorder().record(fail, TRIALS, (LIMIT,))
    assert torch.equal(chain(x[:3], matmuls), expected)


def refused(step: Callable[[int], Tensor], reason: str) -> None:
    with pytest.raises(NotRecordableError, match=reason):
        KernelRecorder().record(lambda rows: [step(rows)], TRIALS, (LIMIT,))


def test_a_result_that_no_kernel_made_is_refused() -> None:
    matmuls, x = layers(), inputs(0)
    refused(lambda rows: chain(x[:rows], matmuls) + 1, "result")


def test_a_step_that_calls_other_kernels_at_other_sizes_is_refused() -> None:
    matmuls, x = layers(), inputs(0)
    refused(lambda rows: chain(x[:rows], matmuls[: rows % 2 + 1]), "other kernels")


def test_numbers_that_are_no_size_are_refused() -> None:
    matmuls, x = layers(), inputs(0)
    refused(lambda rows: chain(x[: 2 * rows], matmuls), "no simple way")


def test_memory_that_follows_no_size_is_refused() -> None:
    x = inputs(0)

    def step(rows: int) -> Tensor:
        empty(rows * rows)
        return ops.rms_norm(x[:rows], NORM, 1e-5)

    refused(step, "memory")


def test_other_inputs_at_other_sizes_are_refused() -> None:
    x, y = inputs(0), inputs(1)
    refused(lambda rows: ops.rms_norm((x if rows == 2 else y)[:rows], NORM, 1e-5), "no simple way")


def test_more_than_was_recorded_is_refused() -> None:
    matmuls, x = layers(), inputs(0)
    recording = KernelRecorder().record(lambda rows: [chain(x[:rows], matmuls)], TRIALS, (LIMIT,))
    with pytest.raises(AssertionError, match="at most 40"):
        recording(LIMIT + 1)


def test_numbers_of_every_kind_reach_the_kernels() -> None:
    """A null pointer, a pointer, integers and floats."""
    x, weight = inputs(0), torch.randn(WIDTH)
    recording = KernelRecorder().record(lambda rows: [ops.rms_norm(x[:rows], weight, 1e-3, 0.75)], TRIALS, (LIMIT,))
    x.mul_(-3)
    recording(3)
    assert torch.equal(recording.results[0][:3], ops.rms_norm(x[:3], weight, 1e-3, 0.75))
