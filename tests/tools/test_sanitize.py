"""The kernels' own tests, on a library that checks every access to memory and every operation."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kernels.cpu.isa import INSTRUCTION_SETS
from tools import sanitize

needs_sanitizers = pytest.mark.skipif(
    sanitize.runtimes() is None, reason="needs a C++ compiler with the sanitizers' runtimes"
)

# A result for whose last element there is no memory, and a rotation at a position that does not exist.
MISTAKES = {
    "write": "y = torch.empty(2, 4); ops.bound().gated(x.data_ptr(), y.data_ptr(), 2, 5, 0)",
    "read": "ops.gather_rotation(x, torch.tensor([2]), torch.float32)",
}


def make(mistake: str, isa: str) -> subprocess.CompletedProcess[str]:
    preloaded = sanitize.runtimes()
    assert preloaded is not None
    code = f"import torch; from quire.kernels.cpu import ops; x = torch.zeros(2, 10); {MISTAKES[mistake]}"
    environment = sanitize.environment(preloaded) | {"QUIRE_CPU_ISA": isa}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@needs_sanitizers
def test_the_kernels_touch_only_their_memory(capfd: pytest.CaptureFixture[str]) -> None:
    """In one test with the proof that mistakes are found: both need the library, which takes its time to compile."""
    assert sanitize.main(["--quick"]) == 0, capfd.readouterr().out[-6000:]
    done = make("write", INSTRUCTION_SETS[0])
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@needs_sanitizers
def test_the_kernels_touch_only_their_memory_with_every_example() -> None:
    assert sanitize.main([]) == 0


@pytest.mark.nightly
@pytest.mark.timeout(900)
@needs_sanitizers
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str, isa: str) -> None:
    done = make(mistake, isa)
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr


def test_without_the_runtimes_it_says_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sanitize, "RUNTIMES", ("libnothere.so",))
    assert sanitize.main([]) == 1
    assert "libnothere.so" in capsys.readouterr().err
