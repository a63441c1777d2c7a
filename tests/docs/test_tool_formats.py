"""docs/reference/tool-formats.md lists every format, and says of each truly whether a template proves it."""

from __future__ import annotations

import re
from pathlib import Path

from quire.parsers.registry import REASONING_FORMATS, TOOL_FORMATS
from tests.parsers.test_templates import UNPROVED_REASONING, UNPROVED_TOOLS, proved

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "tool-formats.md").read_text(encoding="utf-8")


def rows(heading: str) -> dict[str, tuple[str, str]]:
    part = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return {
        name: (models, proof) for name, models, proof in re.findall(r"^\| `(\w+)` \| (.*?) \| (.*) \|$", part, re.M)
    }


def test_every_format_has_a_row() -> None:
    for heading, registry in (("Tool calls", TOOL_FORMATS), ("Reasoning", REASONING_FORMATS)):
        table = rows(heading)
        assert list(table) == list(registry)
        assert {name: models for name, (models, _) in table.items()} == {
            name: registry.get(name).models for name in registry
        }


def test_what_is_called_proved_is() -> None:
    tools, reasoning = proved()
    assert {name for name, (_, proof) in rows("Tool calls").items() if proof == "unproved"} == UNPROVED_TOOLS
    assert {name for name, (_, proof) in rows("Reasoning").items() if proof == "unproved"} == UNPROVED_REASONING
    assert tools == set(TOOL_FORMATS) - UNPROVED_TOOLS
    assert reasoning == set(REASONING_FORMATS) - UNPROVED_REASONING
