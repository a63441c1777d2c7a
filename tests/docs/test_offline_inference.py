"""docs/guides/offline-inference.md is true: its examples run from top to bottom, on a tiny model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tiny import EXPERTS, make_model
from tests.e2e.tiny_tokenizer import write_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "offline-inference.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path / "model", "llama")
    experts = make_model(tmp_path / "experts", "qwen3_moe", **EXPERTS)
    write_tokenizer(folder)
    write_tokenizer(experts)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, Any] = {}
    for match in re.finditer(r"^```python([^\n]*)\n(.*?)^```$", TEXT, flags=re.M | re.S):
        if match[1]:
            (tmp_path / match[1].partition("file=")[2]).write_text(match[2], encoding="utf-8")
            continue
        # Padded, so that a traceback names the line of the page.
        padding = "\n" * (TEXT[: match.start()].count("\n") + 1)
        source = match[2].replace('"smollm2"', repr(str(folder))).replace('"qwen3-moe"', repr(str(experts)))
        exec(compile(padding + source, str(PAGE), "exec"), names)
    assert names["answers"][0].outputs[0].token_ids
    assert names["score"] < 0
    assert names["again"].shape[0] == len(names["tokens"])
    assert int(names["again"][-1].argmax()) == names["completion"].token_ids[-1]
