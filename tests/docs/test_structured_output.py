"""docs/guides/structured-output.md is true: its examples run from top to bottom, on a tiny model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from quire.config.engine import EngineConfig
from quire.config.groups import StructuredConfig
from quire.structured.guidance import GuidanceBackend
from quire.structured.rewrite import REWRITTEN
from quire.structured.schema import MAX_OPTIONAL
from tests.e2e.tiny import make_model
from tests.e2e.tiny_tokenizer import write_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "structured-output.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_examples_run(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama")
    write_tokenizer(folder)
    names: dict[str, Any] = {"MODEL": str(folder)}
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", TEXT, flags=re.M | re.S))
    assert len(blocks) == 4
    for match in blocks:
        line = TEXT[: match.start()].count("\n") + 1
        exec(compile("\n" * line + match[1], str(PAGE), "exec"), names)
    names["llm"].shutdown()


def test_what_the_page_lists_is_what_there_is() -> None:
    listed = set(re.findall(r"`([\w$-]+)`", TEXT))
    keywords = GuidanceBackend.schema_support.keywords - {"$defs", "definitions", "$id", "$anchor", "$schema"}
    bounds = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "additionalItems"}
    assert keywords - bounds <= listed
    assert listed >= REWRITTEN
    assert GuidanceBackend.schema_support.formats <= listed
    assert f"{MAX_OPTIONAL:,}" in TEXT
    for name in StructuredConfig.__dataclass_fields__:
        assert f"`--{name.replace('_', '-')}`" in TEXT
    assert EngineConfig().structured == StructuredConfig()
