"""docs/guides/embeddings.md is true: its search finds what it should, and its request is answered."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from quire.cli.main import main
from quire.server.openai.embeddings.protocol import EmbeddingsRequest
from quire.server.pooling.protocol import RerankRequest
from quire.server.pooling.work import PoolingFields
from tests.server.pooling_bodies import POOLING_BODIES

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


@pytest.mark.parametrize(("route", "model"), [("/v1/embeddings", EmbeddingsRequest), ("/rerank", RerankRequest)])
def test_the_requests_have_fields_that_there_are(route: str, model: type[PoolingFields]) -> None:
    (body,) = re.findall(rf"localhost:8000{route} .*-d '(.*)'$", TEXT, flags=re.M)
    assert not model(**json.loads(body)).model_extra


def test_the_file_is_embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = re.findall(r"^\$ quire (embed .*)$", TEXT, flags=re.M)
    monkeypatch.chdir(tmp_path)
    Path("texts.jsonl").write_text('"a cat"\n{"text": "a dog"}\n')
    assert main(command.split()) == 0
    assert np.load("vectors.npy").shape == (2, 384)


def test_every_route_of_the_table_is_there() -> None:
    rows = re.findall(r"^\| `POST (.*?) \|", TEXT, flags=re.M)
    named = {route for row in rows for route in re.findall(r"/[\w/]+", row)}
    assert named == set(POOLING_BODIES)
