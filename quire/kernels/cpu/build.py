"""Compiles the CPU kernels into one shared library: every source once per instruction set, in parallel processes.

Runs when the package is installed, and at first use if that was not possible; so it imports nothing of Quire.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
# No contraction: where a fused multiply-add is meant it is written, so that every path rounds alike.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
)
COMMON = ("dispatch.cpp", "pool.cpp")  # compiled once, for the oldest processor; all others per instruction set
PORTABLE: dict[str, tuple[str, ...]] = {"portable": ()}
AVX512 = (
    *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"),
    *("-mtune=skylake-avx512", "-mprefer-vector-width=512"),
)
X86 = {
    "portable": ("-O1",),  # for processors of before 2013: not worth the time to compile it better
    "avx2": ("-mavx2", "-mfma", "-mf16c", "-mtune=haswell"),
    "avx512": AVX512,
    "avx512vnni": (*AVX512, "-mavx512vnni"),
}
# dispatch.cpp fills the gaps: VNNI differs from AVX-512 in matmuls of integers alone, and without it AVX2's serve.
COMPLETE = ("portable", "avx2", "avx512")
SETS_OF = dict.fromkeys(("integer_matmul.cpp", "byte_matmul.cpp"), ("portable", "avx2", "avx512vnni"))
# Checks are calls, not inlined: else they take minutes to compile, as would those left out; address finds the same.
# Not optimized: half the time to compile, and the tests, which are mostly Python and checks, run no longer.
SANITIZE = (
    *("-fsanitize=address,undefined", "-fno-sanitize=null,pointer-overflow,object-size", "-fno-sanitize-recover=all"),
    *("--param", "asan-instrumentation-with-call-threshold=0", "-fno-omit-frame-pointer", "-g1", "-O0"),
)


class BuildError(Exception):
    """The library could not be built; the message says why in one line."""


def find_compiler() -> str:
    """The system's C++ compiler. BuildError if there is none."""
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise BuildError(f"none of {', '.join(COMPILERS)} is installed")
    return compiler


def library_name(extra_flags: Sequence[str] = ()) -> str:
    """The file name of the library made from these sources by these flags on this kind of machine."""
    digest = hashlib.sha256(repr((FLAGS, *extra_flags, instruction_sets(), platform.machine())).encode())
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in (".cpp", ".h", ".def"):
            digest.update(path.name.encode() + path.read_bytes())
    return f"libquire-{digest.hexdigest()[:16]}.so"


def instruction_sets() -> dict[str, tuple[str, ...]]:
    """Name and compiler flags of each instruction set that the library is compiled for."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return X86 if is_x86 else PORTABLE


def is_cut(library: Path) -> bool:
    """Whether the end of the file is missing: loading it would end the process by a signal."""
    size = library.stat().st_size
    with library.open("rb") as file:
        header = file.read(64)
    if not header.startswith(b"\x7fELF"):
        return size == 0
    # The table of sections is the last part of a file that a linker writes.
    (at,), (width, count) = struct.unpack_from("=Q", header, 40), struct.unpack_from("=HH", header, 58)
    return bool(size < at + width * count)


def build(target: Path, extra_flags: Sequence[str] = ()) -> None:
    """Compile and link the library. BuildError if that fails; `target` is then untouched."""
    compiler = find_compiler()
    target.parent.mkdir(parents=True, exist_ok=True)
    # Built beside its place and renamed, so that another process never sees half a file.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as scratch:
        jobs = _compilations(compiler, extra_flags, Path(scratch))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, jobs.values()))
        built = Path(scratch) / target.name
        _run([compiler, *FLAGS, *extra_flags, "-shared", *jobs, "-o", str(built)])
        os.replace(built, target)


def _compilations(compiler: str, extra_flags: Sequence[str], scratch: Path) -> dict[str, list[str]]:
    """Object file -> the command that makes it; the sources that take longest first."""
    base = [compiler, *FLAGS, "-c"]
    jobs: dict[str, list[str]] = {}
    sources = [path for path in FOLDER.glob("*.cpp") if path.name not in COMMON]
    for source in sorted(sources, key=lambda path: -path.stat().st_size):
        for name, flags in instruction_sets().items():
            if name not in SETS_OF.get(source.name, COMPLETE):
                continue
            output = str(scratch / f"{source.stem}-{name}.o")
            jobs[output] = [*base, *flags, *extra_flags, f"-DQUIRE_NS={name}", str(source), "-o", output]
    for name in COMMON:
        output = str(scratch / f"{name}.o")
        has_x86 = ["-DQUIRE_X86"] if "avx2" in instruction_sets() else []
        jobs[output] = [*base, *extra_flags, *has_x86, str(FOLDER / name), "-o", output]
    return jobs


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-1:]
        raise BuildError(f"{Path(command[0]).name} failed: {lines[0] if lines else f'exit {done.returncode}'}")
