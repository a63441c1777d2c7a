"""Run the tests of the CPU kernels on a library that checks every access to memory and every arithmetic operation.

Usage: python tools/sanitize.py [--quick] [pytest flags] [tests, if not all]

Builds the kernels with the address and the undefined-behaviour sanitizer and runs their tests in a process into which
the sanitizers' runtimes are loaded first; --quick tries few examples of each, as CI does. Leaks are not looked for:
Python keeps much memory until it ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from quire.kernels.cpu import build, library

ROOT = Path(__file__).resolve().parent.parent
TESTS = (
    "tests/kernels/cpu",
    "tests/attention/test_context_parallel.py",
    "tests/attention/test_cpu_native.py",
    "tests/attention/test_latent.py",
    "tests/attention/test_sparse.py",
    "tests/parallel/test_shared_memory.py",
    "tests/parallel/test_sockets.py",
    "--ignore=tests/kernels/cpu/test_build.py",
    "--hypothesis-seed=0",
)
# Of the long decodes only those with heads of 37 numbers; the others take as long as all other tests together.
QUICK = ("--hypothesis-profile=quick", "-k", "not long_decodes or 37")
RUNTIMES = ("libasan.so", "libubsan.so")


def runtimes() -> list[str] | None:
    """The paths of the sanitizers' runtimes; None if this compiler has none."""
    try:
        compiler = build.find_compiler()
    except build.BuildError:
        return None
    found = []
    for name in RUNTIMES:
        argv = [compiler, f"-print-file-name={name}"]
        found.append(subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip())
    # A compiler prints the bare name of a file that it does not have.
    return found if all(Path(path).is_absolute() for path in found) else None


def environment(preloaded: list[str]) -> dict[str, str]:
    """That of a process which uses the checking library."""
    return {
        # Not a worker of the pytest that may have called this.
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        "QUIRE_CPU_SANITIZE": "1",
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
    }


def main(arguments: list[str]) -> int:
    preloaded = runtimes()
    if preloaded is None:
        print(f"needs a C++ compiler with {' and '.join(RUNTIMES)}, such as g++ on Linux", file=sys.stderr)
        return 1
    library.find_or_build(build.SANITIZE)
    quick = QUICK if "--quick" in arguments else ()
    given = [argument for argument in arguments if argument != "--quick"]
    tests = () if any(not argument.startswith("-") for argument in given) else TESTS
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", *quick, *tests, *given]
    return subprocess.run(command, cwd=ROOT, env=environment(preloaded)).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
