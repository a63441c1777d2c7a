"""docs/quantization.md is true: its method works in one file and one line, and every block of it runs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import quire.layers.quant
from quire.kernels.cpu.matrix import BLOCK_TYPES
from quire.layers.quant.registry import METHODS

PAGE = Path(__file__).parents[2] / "docs" / "quantization.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_works_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, folder = tmp_path / "quant", tmp_path / "model"
    package.mkdir()
    folder.mkdir()
    monkeypatch.setattr(quire.layers.quant, "__path__", [*quire.layers.quant.__path__, str(package)])
    monkeypatch.setattr(METHODS, "_entries", dict(METHODS._entries))
    monkeypatch.setattr(METHODS, "_resolved", dict(METHODS._resolved))
    names: dict[str, object] = {"folder": folder}
    kinds = []
    for match in re.finditer(r"^```python([^\n]*)\n(.*?)^```$", TEXT, flags=re.M | re.S):
        kind, _, value = match[1].strip().partition("=")
        kinds.append(kind)
        if kind == "file":
            (package / value).write_text(match[2])
        elif kind == "registry":
            for name, target in ast.literal_eval(match[2]).items():
                assert name not in METHODS, f"{name} exists by now; the page needs another example"
                METHODS.register(name, target)
        else:
            # Padded, so that a traceback names the line of the page.
            padding = "\n" * (TEXT[: match.start()].count("\n") + 1)
            exec(compile(padding + match[2], str(PAGE), "exec"), names)
    assert kinds == ["file", "registry", "", ""]


def test_every_method_and_every_packed_type_is_on_the_page() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", TEXT, flags=re.M)
    assert sorted(listed) == sorted([*METHODS, "auto"])
    assert all(type_name in TEXT for type_name in BLOCK_TYPES)
