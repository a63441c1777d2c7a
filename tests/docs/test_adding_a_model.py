"""docs/internals/adding-a-model.md is true: its file and its line make a model, and every block of it runs."""

from __future__ import annotations

import ast
import re
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

import quire.models
from quire.models.config import DecoderConfig
from quire.models.registry import ARCHITECTURES
from tools.source_rules import MODEL_FILE_LINES

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "adding-a-model.md"


@dataclass(frozen=True)
class Block:
    label: str  # what follows "python" on the opening line
    line: int
    code: str


def blocks() -> list[Block]:
    text = PAGE.read_text(encoding="utf-8")
    return [
        Block(match[1].strip(), text[: match.start()].count("\n") + 1, match[2])
        for match in re.finditer(r"^```python([^\n]*)\n(.*?)^```$", text, flags=re.M | re.S)
    ]


def test_the_page_works_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contexts: ExitStack
) -> None:
    package = tmp_path / "models"
    folder = tmp_path / "checkpoint"
    package.mkdir()
    folder.mkdir()
    monkeypatch.setattr(quire.models, "__path__", [*quire.models.__path__, str(package)])
    contexts.enter_context(ARCHITECTURES.with_entries({}))
    names: dict[str, object] = {"folder": folder}
    kinds = []
    for block in blocks():
        kind, _, value = block.label.partition("=")
        kinds.append(kind)
        if kind == "file":
            assert block.code.count("\n") <= MODEL_FILE_LINES
            (package / value).write_text(block.code)
        elif kind == "registry":
            for name, target in ast.literal_eval(block.code).items():
                assert name not in ARCHITECTURES, f"{name} exists by now; the page needs another example"
                ARCHITECTURES.register(name, target)
        else:
            # Padded, so that a traceback names the line of the page.
            exec(compile("\n" * block.line + block.code, str(PAGE), "exec"), names)
    assert kinds.count("file") == kinds.count("registry") == 1
    assert kinds.count("") >= 3


def test_the_page_knows_every_switch() -> None:
    page = PAGE.read_text(encoding="utf-8")
    missing = [field.name for field in fields(DecoderConfig) if f"`{field.name}`" not in page]
    assert missing == []
