"""The kernels under compute-sanitizer: no access outside of what they were given.

A test for each file of kernel tests, so that several can run at once (`-n 12`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.helpers import needs_gpu

SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
ROOT = Path(__file__).parents[2]
FILES = [
    *sorted(
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests/kernels/triton").glob("test_*.py")
        if file.name != "test_cards.py"  # which runs nothing
    ),
    "tests/attention/test_triton_fixed.py",
    "tests/kernels/test_ops.py",
]

pytestmark = [
    needs_gpu,
    pytest.mark.skipif(not os.path.exists(SANITIZER), reason="compute-sanitizer is not installed"),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize("file", FILES)
def test_memcheck_finds_nothing(file: str) -> None:
    chosen = ["--hypothesis-profile=quick", "-k", "not native"]  # a kernel is watched at length
    tests = ["-q", "-n", "0", "-p", "no:cacheprovider", "-p", "no:benchmark", file, *chosen]
    command = [SANITIZER, "--tool", "memcheck", "--error-exitcode", "99", sys.executable, "-m", "pytest", *tests]
    # The caching allocator would hide an access beyond a tensor but inside its pool.
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**outer, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in found.stdout
