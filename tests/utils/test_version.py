"""The version that ranks compare: of the sources, not of a constant alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from quire.utils import version


def built(folder: Path) -> str:
    command = [sys.executable, "-c", "from quire.utils.version import build_version; print(build_version())"]
    return subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True).stdout


def test_two_trees_have_one_version_exactly_if_their_sources_are_equal(tmp_path: Path) -> None:
    for name in ("one", "two"):
        target = tmp_path / name / "quire"
        (target / "utils").mkdir(parents=True)
        (target / "__init__.py").touch()
        (target / "utils/__init__.py").touch()
        shutil.copy(version.__file__, target / "utils/version.py")
    first, second = (built(tmp_path / name) for name in ("one", "two"))
    assert first == second
    assert first.startswith(f"{version.VERSION}+")
    (tmp_path / "two/quire/kernel.cpp").write_text("int one = 1;")
    assert built(tmp_path / "two") != first
