"""A report says where its numbers come from, and holds no secret."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire.bench import report


def test_it_names_commit_machine_versions_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/bin/quire", "bench", "serve", "--model", "a b", "--api-key=hush"])
    found = report.environment("numpy", "no-such-package", secrets=["hush", ""])
    assert found["command"] == "quire bench serve --model 'a b' '--api-key=***'"
    assert found["machine"]["cpu"]
    assert found["packages"]["no-such-package"] is None
    assert found["packages"]["numpy"]
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert found["commit"] == (head.stdout.strip() or None)


def test_a_copy_outside_a_repository_has_no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(report, "__file__", str(tmp_path / "report.py"))
    found = report.environment()
    assert (found["commit"], found["dirty"]) == (None, None)


def test_a_machine_without_git_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert report.environment()["commit"] is None


def test_a_report_is_whole_or_absent(tmp_path: Path) -> None:
    path = report.write_report(tmp_path / "deep" / "r.json", {"commit": "c"}, [1], settings={"n": 2})
    assert json.loads(path.read_text()) == {"environment": {"commit": "c"}, "settings": {"n": 2}, "results": [1]}
    with pytest.raises(TypeError):
        report.write_report(tmp_path / "bad.json", {}, object())
    assert [found.name for found in tmp_path.rglob("*.json*")] == ["r.json"]
