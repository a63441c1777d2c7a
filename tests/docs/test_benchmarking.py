"""The commands of the benchmark guide are ones that the program understands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from quire.bench.options import GOODPUT_METRICS
from quire.cli.bench import KINDS
from quire.cli.main import build_parser

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "benchmarking.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ quire (bench .*?)(?: > \S+)?$", PAGE, flags=re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command: str) -> None:
    build_parser("bench").parse_args(shlex.split(command))


def test_every_kind_and_measure_is_explained() -> None:
    assert {command.split()[1] for command in COMMANDS} == set(KINDS)
    for kind in KINDS:
        assert f"| `quire bench {kind}` |" in PAGE
    for metric in GOODPUT_METRICS:
        assert f"| {metric.upper()} |" in PAGE


def test_flags_that_are_named_exist(capsys: pytest.CaptureFixture[str]) -> None:
    known = ""
    for kind in KINDS:
        with pytest.raises(SystemExit):
            build_parser("bench").parse_args(["bench", kind, "--help"])
        known += capsys.readouterr().out
    named = set(re.findall(r"`(--[a-z-]+)", PAGE))
    assert named
    assert {flag for flag in named if flag not in known} == set()
