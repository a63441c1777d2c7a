"""Compiles the CPU kernels while the package is built; pyproject.toml says everything else.

Without a C++ compiler the installation goes on: the kernels are then compiled at first use, or torch serves.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PACKAGE = Path("quire/kernels/cpu")
spec = importlib.util.spec_from_file_location("quire_cpu_build", PACKAGE / "build.py")
assert spec is not None
assert spec.loader is not None
cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cpu)


class BuildWithKernels(build_py):
    """Puts the library beside its sources: in the wheel, or in the working tree of an editable installation."""

    def run(self) -> None:
        super().run()
        folder = PACKAGE if self.editable_mode else Path(self.build_lib) / PACKAGE
        for old in folder.glob("libquire-*.so"):
            old.unlink()
        try:
            cpu.build(folder / cpu.library_name())
        except cpu.BuildError as error:
            print(f"quire: the CPU kernels are not compiled now ({error})", file=sys.stderr)


class WheelForThisMachine(bdist_wheel):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = not any(shutil.which(name) for name in cpu.COMPILERS)

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelForThisMachine})
