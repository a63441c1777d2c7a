"""The README's set-up commands are two, and CI runs the second one as it stands there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tools.check import ROOT

COMMANDS = re.findall(r"^```bash\n(.*?)\n```$", (ROOT / "README.md").read_text(), flags=re.M | re.S)


def test_there_are_two_set_up_commands_of_one_line() -> None:
    run, test = COMMANDS
    assert "\n" not in run + test
    assert run.endswith(".venv/bin/quire serve")
    assert "tools/check.py" in test
    assert test.endswith("-m pytest")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone whose second README command only tells that it ran, and where."""
    root = tmp_path / "clone"
    (root / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", root / ".ci" / "run")
    readme = (ROOT / "README.md").read_text()
    assert readme.count(COMMANDS[1]) == 1
    (root / "README.md").write_text(
        readme.replace(COMMANDS[0], "touch wrong").replace(
            COMMANDS[1], 'pwd > ran && echo "${QUIRE_TEMPLATES-unset}" >> ran && (exit "${CODE:-0}")'
        )
    )
    return root


def ci(clone: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [clone / ".ci" / "run"],
        cwd=clone.parent,
        env={"PATH": "/usr/bin:/bin", **variables},
        capture_output=True,
        text=True,
    )


def test_ci_runs_the_second_command_in_the_clone(clone: Path) -> None:
    done = ci(clone)
    assert done.returncode == 0, done.stderr
    assert (clone / "ran").read_text().splitlines() == [str(clone), "unset"]
    assert not (clone / "wrong").exists()


def test_ci_fails_when_the_command_fails(clone: Path) -> None:
    assert ci(clone, CODE="3").returncode == 3
