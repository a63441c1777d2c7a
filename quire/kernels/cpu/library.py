"""The compiled CPU kernels: finds or builds the shared library and binds its functions. Knows no models.

The library is built once per machine, for that machine's processor, with the system's C++ compiler, and kept in the
cache folder. Without a compiler the torch references serve, and one log line says so.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

import torch

from quire.config.env import cache_dir
from quire.utils.log import get_logger

logger = get_logger(__name__)

SOURCES = ("kernels.cpp", "pool.h", "simd.h")
COMPILERS = ("c++", "g++", "clang++")
# No contraction: where a fused multiply-add is meant it is written, so that every path rounds alike.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")
ABI_VERSION = 1

_POINTER, _SIZE, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_SIGNATURES: dict[str, list[type]] = {
    "quire_set_threads": [_INT],
    "quire_linear": [_POINTER] * 4 + [_SIZE] * 3,
    "quire_add_rms_norm": [_POINTER] * 5 + [_SIZE] * 3 + [_FLOAT] * 2,
    "quire_gated": [_POINTER] * 2 + [_SIZE] * 2 + [_INT],
    "quire_prepare_qkv": [_POINTER] * 8 + [_SIZE] * 8 + [_FLOAT] * 2,
    "quire_attention": [_POINTER] * 7 + [_SIZE] * 8 + [_FLOAT] * 2,
}


def unavailable() -> str | None:
    """Why the kernels cannot be used here; None if they can. Builds the library on first use."""
    return None if load() is not None else "the CPU kernels could not be built"


@cache
def load() -> ctypes.CDLL | None:
    """The library, bound and ready, or None."""
    try:
        library = ctypes.CDLL(str(_build()))
    except (OSError, subprocess.CalledProcessError) as error:
        detail = (
            error.stderr.strip().splitlines()[-1:] if isinstance(error, subprocess.CalledProcessError) else [error]
        )
        logger.warning(
            "no CPU kernels (%s); using torch, which is slower. Install a C++ compiler, for example g++",
            *(detail or ["the compiler failed"]),
        )
        return None
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    library.quire_set_threads(torch.get_num_threads())
    return library


def bound() -> ctypes.CDLL:
    """The library, for code that runs only where it was chosen."""
    library = load()
    assert library is not None, "native kernels were chosen without a library"
    return library


def _build() -> Path:
    """The path of the library for these sources, this processor and this compiler, compiled if it is not there."""
    folder = Path(__file__).parent
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise OSError(f"none of {', '.join(COMPILERS)} is installed")
    digest = hashlib.sha256(" ".join([*FLAGS, compiler, _processor()]).encode())
    for name in SOURCES:
        digest.update((folder / name).read_bytes())
    target = cache_dir() / "native" / f"quire-{ABI_VERSION}-{digest.hexdigest()[:16]}.so"
    if target.exists():
        return target
    started = time.perf_counter()
    logger.info("building the CPU kernels, once for this machine ...")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Built beside its place and renamed, so that another process never sees half a file.
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / target.name
        command = [compiler, *FLAGS, str(folder / "kernels.cpp"), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        os.replace(built, target)
    logger.info("built the CPU kernels in %.1f s", time.perf_counter() - started)
    return target


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    wanted = ("model name", "flags", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
