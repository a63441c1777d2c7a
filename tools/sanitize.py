"""Run the tests of the CPU kernels on a library that checks every access to memory and every arithmetic operation.

Usage: python tools/sanitize.py [pytest arguments]

Builds the kernels with the address and the undefined-behaviour sanitizer and runs their tests in a process into which
the sanitizer's runtime is loaded first. Leaks are not looked for: Python keeps much memory until it ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from quire.kernels.cpu import build

ROOT = Path(__file__).resolve().parent.parent
TESTS = (
    "tests/kernels/cpu",
    "tests/attention/test_cpu_native.py",
    "--ignore=tests/kernels/cpu/test_build.py",
    "--hypothesis-seed=0",
)


def runtime(compiler: str, name: str) -> str:
    done = subprocess.run([compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def main(arguments: list[str]) -> int:
    compiler = build.find_compiler()
    environment = {
        **os.environ,
        "QUIRE_CPU_SANITIZE": "1",
        "LD_PRELOAD": " ".join(runtime(compiler, name) for name in ("libasan.so", "libubsan.so")),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", *(arguments or TESTS)]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
