"""The native library: built once, bound without Python symbols, and independent of the batch to the last bit."""

from __future__ import annotations

import logging
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.cpu import library, ops
from quire.types.errors import ConfigError
from tests.kernels.cpu.isa import INSTRUCTION_SETS, examples, using

needs_compiler = pytest.mark.skipif(library.unavailable() is not None, reason="needs a C++ compiler")


@needs_compiler
@examples(60)
@given(
    rows=st.integers(1, 70),
    inner=st.integers(1, 300),
    outputs=st.integers(1, 100),
    start=st.integers(0, 69),
    bias=st.booleans(),
)
def test_a_row_of_a_matmul_has_the_same_bits_in_any_batch(
    rows: int, inner: int, outputs: int, start: int, bias: bool
) -> None:
    generator = torch.Generator().manual_seed(inner)
    x, weight = torch.randn(140, inner, generator=generator), torch.randn(outputs, inner, generator=generator)
    added = torch.randn(outputs, generator=generator) if bias else None
    whole = ops.linear_transposed(x, weight, added)
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, weight, added), atol=1e-3, rtol=1e-4)
    assert torch.equal(ops.linear_transposed(x[start : start + rows], weight, added), whole[start : start + rows])


@needs_compiler
@pytest.mark.parametrize("width", [1, 7, 16, 33, 576])
def test_small_ops_do_not_depend_on_the_batch(width: int) -> None:
    x, residual, weight = torch.randn(50, 2 * width), torch.randn(50, 2 * width), torch.randn(2 * width)
    for run in (ops.silu_and_mul, ops.gelu_tanh_and_mul, lambda rows: ops.rms_norm(rows, weight, 1e-6)):
        whole = run(x)
        assert all(torch.equal(run(x[i : i + 3]), whole[i : i + 3]) for i in range(47))
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-6)
    part = ops.add_rms_norm(x[5:9], residual[5:9], weight, 1e-6)
    assert torch.equal(part[0], normed[5:9])
    assert torch.equal(part[1], total[5:9])


@needs_compiler
def test_extreme_values() -> None:
    gate = torch.tensor([[-200.0, -88.0, -1e-30, 0.0, 88.0, 200.0, 3e38, -3e38]])
    up = torch.ones_like(gate)
    out = ops.silu_and_mul(torch.cat([gate, up], dim=1))
    torch.testing.assert_close(out, torch.nn.functional.silu(gate), atol=1e-30, rtol=1e-5)
    nan = ops.silu_and_mul(torch.tensor([[float("nan"), 1.0]]))
    assert nan.isnan().all()


@needs_compiler
def test_an_engine_gives_torchs_threads_to_the_kernels() -> None:
    loaded = library.load()
    assert loaded is not None
    before = loaded.num_threads, torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        library.take_threads()
        assert (library.num_threads(), torch.get_num_threads()) == (3, 1)
    finally:
        loaded.set_threads(before[0])
        torch.set_num_threads(before[1])


@needs_compiler
def test_idle_threads_use_no_time() -> None:
    with using(threads=4):
        ops.first_max(torch.zeros(64, 20000))
        # They spin for a tenth of a millisecond after work; then a second's wait must cost next to nothing.
        started, wall = time.process_time(), time.monotonic()
        threading.Event().wait(0.5)
        assert time.process_time() - started < 0.1 * (time.monotonic() - wall)


@needs_compiler
def test_calls_from_several_threads_do_not_mix() -> None:
    scores = torch.randn(40, 30000, generator=torch.Generator().manual_seed(0))
    with using(threads=3), ThreadPoolExecutor(4) as pool:
        expected = ops.first_max(scores)[0]
        for ids, _ in pool.map(ops.first_max, [scores] * 24):
            assert torch.equal(ids, expected)


@needs_compiler
@pytest.mark.parametrize("width", [1, 7, 16, 33, 576])
def test_small_ops_have_the_same_bits_on_every_instruction_set(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x, weight = torch.randn(9, 2 * width, generator=generator), torch.randn(2 * width, generator=generator)
    results = []
    for isa in INSTRUCTION_SETS:
        with using(isa):
            results.append((ops.rms_norm(x, weight, 1e-6), ops.silu_and_mul(x), ops.gelu_tanh_and_mul(x)))
    for result in results:
        assert all(torch.equal(mine, first) for mine, first in zip(result, results[0], strict=True))


@needs_compiler
def test_an_unknown_instruction_set_is_refused() -> None:
    loaded = library.load()
    assert loaded is not None
    with pytest.raises(ConfigError, match=r"QUIRE_CPU_ISA=sse9.*portable"):
        loaded.select("sse9")


@needs_compiler
def test_the_library_knows_no_python() -> None:
    symbols = subprocess.run(
        ["nm", "-D", str(library._find_or_build())], check=True, capture_output=True, text=True
    ).stdout
    assert "quire_kernel" in symbols
    assert not [line for line in symbols.splitlines() if " Py" in line or "_Py" in line]


def test_without_a_compiler_torch_serves_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    monkeypatch.setattr(library, "INSTALLED", tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    with caplog.at_level("WARNING"):
        assert library.load.__wrapped__() is None
    assert "Install a C++ compiler" in caplog.text
    assert not list(tmp_path.rglob("*.so"))
