"""docs/internals/adding-a-tool-format.md is true: its file and its line make a format, and every block of it runs."""

from __future__ import annotations

import ast
import re
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path

import pytest

import quire.parsers.formats
from quire.parsers.format import ToolFormat
from quire.parsers.registry import TOOL_FORMATS

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "adding-a-tool-format.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = [
    (match[1].strip(), TEXT[: match.start()].count("\n") + 1, match[2])
    for match in re.finditer(r"^```python([^\n]*)\n(.*?)^```$", TEXT, flags=re.M | re.S)
]


def test_the_page_works_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contexts: ExitStack
) -> None:
    monkeypatch.setattr(quire.parsers.formats, "__path__", [*quire.parsers.formats.__path__, str(tmp_path)])
    contexts.enter_context(TOOL_FORMATS.with_entries({}))
    names: dict[str, object] = {}
    kinds = []
    for label, line, code in BLOCKS:
        kind, _, value = label.partition("=")
        kinds.append(kind)
        if kind == "file":
            (tmp_path / value).write_text(code, encoding="utf-8")
        elif kind == "registry":
            for name, target in ast.literal_eval(code).items():
                assert name not in TOOL_FORMATS, f"{name} exists by now; the page needs another example"
                TOOL_FORMATS.register(name, target)
        else:
            # Padded, so that a traceback names the line of the page.
            exec(compile("\n" * line + code, str(PAGE), "exec"), names)
    assert kinds.count("file") == kinds.count("registry") == 1
    assert kinds.count("") >= 4


def test_the_page_knows_every_field() -> None:
    rows = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", TEXT, flags=re.M))))
    assert {field.name for field in fields(ToolFormat)} <= rows
