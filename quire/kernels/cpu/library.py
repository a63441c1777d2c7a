"""The compiled CPU kernels: finds or builds the shared library and binds its functions. Knows no models.

The library is compiled when the package is installed. If that was not possible it is compiled at first use, and kept
in the cache folder. Without a compiler the torch references serve, and one log line says so.
"""

from __future__ import annotations

import ctypes
import re
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch

from quire.config import env
from quire.kernels.cpu import build
from quire.kernels.cpu.tracing import Kernel
from quire.types.errors import ConfigError
from quire.utils.log import get_logger

logger = get_logger(__name__)

INSTALLED = build.FOLDER  # where the package's installation puts the library


def unavailable() -> str | None:
    """Why the kernels cannot be used here; None if they can. Builds the library on first use."""
    return None if load() is not None else "the CPU kernels could not be built"


class Library:
    """The shared library. `kernels` holds its functions for one instruction set, which `select` changes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kernels = SimpleNamespace()
        self._functions = ctypes.CDLL(str(path))
        self._functions.quire_instruction_set.restype = ctypes.c_char_p
        self._functions.quire_kernel.restype = ctypes.c_void_p
        self._functions.quire_invoker.restype = ctypes.c_void_p
        self.replay = self._functions.quire_replay
        self.replay.argtypes, self.replay.restype = [ctypes.c_void_p, ctypes.c_int64], None
        self.instruction_sets = self._instruction_sets()  # those that run here, the best first
        self.set_threads(torch.get_num_threads())
        self.select(env.cpu_instruction_set() or self.instruction_sets[0])

    def select(self, instruction_set: str) -> None:
        if instruction_set not in self.instruction_sets:
            raise ConfigError(
                f"QUIRE_CPU_ISA={instruction_set} does not run here; use one of {', '.join(self.instruction_sets)}"
            )
        self.instruction_set = instruction_set
        for name, types in parameters().items():
            address = self._functions.quire_kernel(instruction_set.encode(), name.encode())
            setattr(self.kernels, name, Kernel(name, ctypes.CFUNCTYPE(None, *types)(address)))

    def invoker(self, name: str) -> int:
        """The address of what calls a kernel with recorded arguments."""
        address: int = self._functions.quire_invoker(self.instruction_set.encode(), name.encode())
        return address

    def set_threads(self, count: int) -> None:
        self._functions.quire_set_threads(ctypes.c_int(count))

    @property
    def num_threads(self) -> int:
        return int(self._functions.quire_num_threads())

    def _instruction_sets(self) -> list[str]:
        names: list[str] = []
        while name := self._functions.quire_instruction_set(len(names)):
            names.append(name.decode())
        return names


@cache
def load() -> Library | None:
    """The library, bound and ready, or None."""
    try:
        return Library(_find_or_build())
    except (OSError, build.BuildError) as error:
        fix = "Install a C++ compiler, for example g++"
        if isinstance(error, OSError):  # without a number: the loader's, about a file that was built
            fix = "Delete that file" if error.errno is None else "Set QUIRE_CACHE to a folder that can be written to"
        logger.warning("no CPU kernels (%s); using torch, which is slower. %s", error, fix)
        return None


@cache
def bound() -> SimpleNamespace:
    """The kernels, for code that runs only where they were chosen."""
    library = load()
    assert library is not None, "native kernels were chosen without a library"
    return library.kernels


def multiplies_integers() -> bool:
    """Whether the processor has instructions for products of 16-bit integers, which do twice as many as of floats."""
    library = load()
    return library is not None and library.instruction_set == "avx512vnni"


def take_threads() -> None:
    """Give torch's threads to the kernels, which do the heavy work; what torch still does, it does with one.

    Its threads spin for milliseconds after an op before they sleep, and would take the cores from the kernels.
    """
    library = load()
    assert library is not None, "native kernels were chosen without a library"
    library.set_threads(torch.get_num_threads())
    torch.set_num_threads(1)


def num_threads() -> int:
    library = load()
    return torch.get_num_threads() if library is None else library.num_threads


def _find_or_build() -> Path:
    return find_or_build(build.SANITIZE if env.cpu_sanitizers() else ())


def find_or_build(extra_flags: tuple[str, ...]) -> Path:
    """The library for these sources: the installed one, else the cached one, compiled if it is not there."""
    name = build.library_name(extra_flags)
    target = env.cache_dir() / "native" / name
    for path in (INSTALLED / name, target):
        if path.exists():
            if not build.is_cut(path):
                return path
            logger.warning("%s is not whole, as after a full disk; the CPU kernels are built again", path)
    started = time.perf_counter()
    logger.info("building the CPU kernels, once for this machine ...")
    build.build(target, extra_flags)
    logger.info("built the CPU kernels in %.1f s", time.perf_counter() - started)
    return target


_TYPES: dict[str, type] = {"int64_t": ctypes.c_int64, "int": ctypes.c_int, "float": ctypes.c_float}


@cache
def parameters() -> dict[str, tuple[type, ...]]:
    """The C types of every kernel's parameters, from the list that the library itself is made from."""
    text = re.sub(r"//.*", "", (build.FOLDER / "kernels.def").read_text())
    return {
        name: tuple(_c_type(parameter.strip()) for parameter in listed.split(","))
        for name, listed in re.findall(r"KERNEL\((\w+),([^)]*)\)", text)
    }


def _c_type(parameter: str) -> type:
    return ctypes.c_void_p if "*" in parameter else _TYPES[parameter.split()[0]]
