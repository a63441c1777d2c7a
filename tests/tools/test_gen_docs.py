"""Generated pages are committed as generated."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import gen_docs


def test_generated_pages_are_up_to_date() -> None:
    assert gen_docs.stale() == [], "run python tools/gen_docs.py"


def test_a_stale_page_is_found_and_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs" / "reference").mkdir(parents=True)
    (tmp_path / "docs" / "reference" / "settings.md").write_text("old")
    monkeypatch.setattr(gen_docs, "ROOT", tmp_path)
    monkeypatch.setattr(gen_docs.stale, "__defaults__", (tmp_path,))
    assert gen_docs.main(["--check"]) == 1
    assert "docs/reference/settings.md is out of date" in capsys.readouterr().out
    assert gen_docs.main([]) == 0
    assert gen_docs.main(["--check"]) == 0
