"""docs/guides/embeddings.md is true: its search finds what it should, and its request is answered."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from quire.server.openai.embeddings.protocol import EmbeddingsRequest

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "embeddings.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_search_finds_what_it_should(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.M | re.S)
    assert len(code.splitlines()) <= 20
    exec(compile(code, str(PAGE), "exec"), {})
    answers = [line.partition(" -> ")[2] for line in capsys.readouterr().out.splitlines()]
    assert answers == [
        "Water boils at 100 degrees Celsius at sea level.",
        "The cat sleeps on the warm windowsill.",
        "Interest rates rose for the third time this year.",
    ]


def test_the_request_has_fields_that_there_are() -> None:
    (body,) = re.findall(r"-d '(.*)'$", TEXT, flags=re.M)
    assert not EmbeddingsRequest(**json.loads(body)).model_extra
