"""The kernels' own tests, on a library that checks every access to memory and every operation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from quire.kernels.cpu import build
from tests.kernels.cpu import test_coverage
from tests.kernels.cpu.isa import INSTRUCTION_SETS
from tests.tools import mistakes
from tools import sanitize

needs_sanitizers = pytest.mark.skipif(
    sanitize.runtimes() is None, reason="needs a C++ compiler with the sanitizers' runtimes"
)
FOUND = 99  # the exit code of a process in which a mistake was found


def make_mistakes() -> dict[tuple[str, str, str], int]:
    """(instruction set, kernel, what is too short) -> exit code"""
    preloaded = sanitize.runtimes()
    assert preloaded is not None
    environment = sanitize.environment(preloaded)
    # Where a mistake was made need not be told; to find that out takes seconds each time.
    environment["ASAN_OPTIONS"] += f":exitcode={FOUND}:symbolize=0"
    done = subprocess.run(
        [sys.executable, "-m", mistakes.__name__], env=environment, capture_output=True, text=True, cwd=sanitize.ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    return {(isa, kernel, too_short): int(code) for isa, kernel, too_short, code in lines}


@pytest.mark.first
@pytest.mark.timeout(900)
@needs_sanitizers
def test_the_kernels_touch_only_their_memory(capfd: pytest.CaptureFixture[str]) -> None:
    """In one test with the proof that mistakes are found: both need the library, which takes its time to compile."""
    assert sanitize.main(["--quick"]) == 0, capfd.readouterr().out[-6000:]
    made = make_mistakes()
    assert {isa for isa, _, _ in made} == {*INSTRUCTION_SETS}
    assert {what: code for what, code in made.items() if code != FOUND} == {}


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@needs_sanitizers
def test_the_kernels_touch_only_their_memory_with_every_example() -> None:
    assert sanitize.main([]) == 0


@pytest.mark.parametrize("module", test_coverage.MODULES, ids=lambda module: module.__name__)
def test_all_tests_that_hold_a_kernel_are_run(module: ModuleType) -> None:
    assert module.__file__ is not None
    path = Path(module.__file__).relative_to(sanitize.ROOT)
    assert any(path.is_relative_to(test) for test in sanitize.TESTS)


def test_without_the_runtimes_it_says_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sanitize, "RUNTIMES", ("libnothere.so",))
    assert sanitize.main([]) == 1
    assert "libnothere.so" in capsys.readouterr().err


@needs_sanitizers
def test_a_library_that_does_not_build_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SANITIZE", ("-fsanitize=nothing-of-the-kind",))
    with pytest.raises(build.BuildError, match="nothing-of-the-kind"):
        sanitize.main([])
