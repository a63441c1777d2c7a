"""docs/guides/gpu.md is true: its commands and flags are understood, and its picture is of the table that is kept."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from quire.cli.main import build_parser

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "gpu.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ quire (.*)$", PAGE, flags=re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command: str) -> None:
    words = shlex.split(command)
    build_parser(words[0]).parse_args(words)


def test_flags_that_are_named_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser("run").parse_args(["run", "--help-all"])
    known = capsys.readouterr().out
    named = set(re.findall(r"`(--[a-z-]+)", PAGE))
    assert "--deterministic" in named
    assert {flag for flag in named if flag not in known} == set()


def test_the_picture_is_of_the_table(tmp_path: Path) -> None:
    made = tmp_path / "picture.svg"
    subprocess.run([sys.executable, "benchmarks/gpu_picture.py", "--out", str(made)], check=True, cwd=ROOT)
    assert made.read_bytes() == (ROOT / "docs" / "images" / "gpu-vs-vllm.svg").read_bytes()
