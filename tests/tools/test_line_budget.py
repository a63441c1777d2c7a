"""tools/line_budget.py counts each package once, and holds the core to its budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check, line_budget
from tools.line_budget import CORE_LINES, lines_of, main


def write(root: Path, name: str, text: str) -> None:
    path = root / "quire" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_groups(tmp_path: Path) -> None:
    write(tmp_path, "sched/a.py", '"""What."""\n\nx = 1  # and why\n')
    write(tmp_path, "kernels/cpu/a.cpp", "int a;\n\n\nint b;\n")
    write(tmp_path, "server/deep/er/a.py", "x = 1\n")
    write(tmp_path, "loader/a.py", "x = 1\n\n")
    write(tmp_path, "loader/a.json", "{}\n")
    write(tmp_path, "__init__.py", "x = 1\n")
    expected = {"core": (3, 2), "kernels": (4, 2), "surfaces": (1, 1), "others": (3, 2)}
    assert lines_of(tmp_path) == expected
    write(tmp_path, "elsewhere/a.py", "x = 1\n")
    assert lines_of(tmp_path) == {**expected, "core": (4, 3)}, "a new package is core until it is named"


def test_the_core_has_a_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "kv/a.py", "x = 1\n\n" * (CORE_LINES // 2))
    write(tmp_path, "cli/a.py", "x = 1\n" * 3 * CORE_LINES)
    assert main([str(tmp_path)]) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == f"core       {CORE_LINES:,} lines ({CORE_LINES // 2:,} without blank ones), budget {CORE_LINES:,}"
    write(tmp_path, "kv/b.py", "x = 1\n")
    assert main([str(tmp_path)]) == 1
    assert f"the core has {CORE_LINES + 1:,} lines, at most {CORE_LINES:,}" in capsys.readouterr().out


def test_the_one_check_command_prints_the_sums(capsys: pytest.CaptureFixture[str]) -> None:
    (mine,) = (one for one in check.CHECKS if one.name == "line budget")
    check.report([check.run(mine)])
    out = capsys.readouterr().out
    assert out.startswith("core ")
    assert all(f"\n{group} " in out for group in line_budget.GROUPS)
    assert "line budget  pass" in out
