"""Building the library: with the package, at first use, never on import, and not at all without a compiler."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire.config import env
from quire.kernels.cpu import build, library
from tests.kernels.cpu.isa import needs_library

ROOT = Path(__file__).resolve().parents[3]


def source_tree(target: Path) -> Path:
    """A copy of what an installation reads."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target / name)
    skipped = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "quire", target / "quire", ignore=skipped)
    return target


def make_wheel(tree: Path, out: Path, path: str) -> tuple[zipfile.ZipFile, str]:
    """(the wheel that pip makes of the tree with this PATH, what pip said)"""
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps", "--no-index"]
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(
        [*command, "-w", str(out), str(tree)], env=environment, capture_output=True, text=True, timeout=850
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    return zipfile.ZipFile(wheel), done.stdout + done.stderr


def test_without_a_compiler_the_package_installs_and_says_so(tmp_path: Path) -> None:
    tree, out = tmp_path / "tree", tmp_path / "out"
    tree.mkdir()
    wheel, said = make_wheel(source_tree(tree), out, path=str(tmp_path))
    names = wheel.namelist()
    assert not [name for name in names if name.endswith(".so")]
    assert {"quire/kernels/cpu/attention.cpp", "quire/kernels/cpu/kernels.def", "quire/kernels/cpu/pool.h"} <= {
        *names
    }
    assert "the CPU kernels are not compiled now (none of c++" in said
    assert "none-any" in str(wheel.filename)


FAKE_COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
echo compiled > "$2"
"""


@pytest.mark.parametrize(
    "compiler", ["fake", pytest.param("real", marks=[pytest.mark.nightly, pytest.mark.timeout(900), needs_library])]
)
def test_an_installation_brings_the_library(tmp_path: Path, compiler: str) -> None:
    tree, out, path = tmp_path / "tree", tmp_path / "out", os.environ["PATH"]
    if compiler == "fake":
        for name in build.COMPILERS:
            (tmp_path / name).write_text(FAKE_COMPILER)
            (tmp_path / name).chmod(0o755)
        path = f"{tmp_path}:{path}"
    tree.mkdir()
    wheel, said = make_wheel(source_tree(tree), out, path)
    (beside,) = [Path(name).parent for name in wheel.namelist() if name.endswith("quire/kernels/cpu/build.py")]
    assert str(beside / build.library_name()) in wheel.namelist()
    assert "py3-none-any" not in str(wheel.filename)
    assert "not compiled" not in said


def test_import_does_not_compile(tmp_path: Path) -> None:
    for name in build.COMPILERS:
        (tmp_path / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/called\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    code = "import quire, quire.kernels.cpu.ops, quire.attention.cpu_native, quire.worker.worker"
    environment = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin", "QUIRE_CACHE": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, cwd=ROOT)
    assert not (tmp_path / "called").exists()
    assert not (tmp_path / "cache").exists()


def test_first_use_builds_once_into_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    built: list[Path] = []

    def build_one(target: Path, extra_flags: tuple[str, ...]) -> None:
        built.append(target)
        target.parent.mkdir(parents=True)
        target.write_text("compiled")

    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    monkeypatch.delenv("QUIRE_CPU_SANITIZE", raising=False)
    monkeypatch.setattr(library, "INSTALLED", tmp_path / "nothing")
    monkeypatch.setattr(build, "build", build_one)
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    with caplog.at_level("INFO", logger="quire"):
        first, second = library._find_or_build(), library._find_or_build()
    assert first == second == tmp_path / "native" / build.library_name()
    assert built == [first]
    assert "building the CPU kernels" in caplog.text


@needs_library
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_library_that_was_cut_is_built_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: float) -> None:
    """As after a full disk or a crash: loaded, it would end the process by SIGBUS."""
    whole = library._find_or_build().read_bytes()
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    monkeypatch.setattr(library, "INSTALLED", tmp_path / "nothing")
    monkeypatch.setattr(build, "build", lambda target, extra_flags: target.write_bytes(whole))
    target = tmp_path / "native" / build.library_name(build.SANITIZE if env.cpu_sanitizers() else ())
    target.parent.mkdir()
    target.write_bytes(whole[: int(kept * len(whole))])
    assert library._find_or_build() == target
    assert target.read_bytes() == whole
    assert not build.is_cut(target)


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (build.BuildError("none of c++ is installed"), "Install a C++ compiler"),
        (OSError("libquire.so: invalid ELF header"), "Delete that file"),
        (PermissionError(errno.EACCES, "Permission denied", "native"), "Set QUIRE_CACHE"),
    ],
)
def test_without_kernels_a_line_says_what_helps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, fix: str
) -> None:
    def find() -> Path:
        raise error

    monkeypatch.setattr(library, "_find_or_build", find)
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    assert library.load.__wrapped__() is None
    assert fix in caplog.text


def test_an_installed_library_is_preferred(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("QUIRE_CPU_SANITIZE", raising=False)
    monkeypatch.setattr(library, "INSTALLED", tmp_path)
    (tmp_path / build.library_name()).write_text("compiled")
    assert library._find_or_build() == tmp_path / build.library_name()


def test_a_failing_compiler_is_quoted_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'kernels.h:1: error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(build.BuildError, match=r"c\+\+ failed: kernels.h:1: error: no such thing"):
        build.build(tmp_path / "out" / "library.so")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.nightly
@pytest.mark.timeout(900)
@needs_library
def test_no_instruction_set_leaks_into_another(tmp_path: Path) -> None:
    """A weak symbol outside of a set's namespace exists once per set under one name; the linker keeps any of them."""
    jobs = build._compilations(build.find_compiler(), (), tmp_path)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(build._run, jobs.values()))
    leaks = []
    for output in jobs:
        name = Path(output).stem.rpartition("-")[2]
        if name not in build.instruction_sets():
            continue
        symbols = subprocess.run(["nm", "-C", output], check=True, capture_output=True, text=True).stdout
        weak = [line for line in symbols.splitlines() if line[17:18] in ("W", "V", "u")]
        leaks += [line for line in weak if f"quire::{name}::" not in line and "DW.ref." not in line]
    assert not leaks
