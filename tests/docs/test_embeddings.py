"""docs/guides/embeddings.md is true: its search finds what it should, and its request is answered."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from quire.cli.main import main
from tests.frontend.fake_client import PoolingClient
from tests.server.helpers import serving
from tests.server.pooling_bodies import POOLING_BODIES

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "embeddings.md"
TEXT = PAGE.read_text(encoding="utf-8")
CODE = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.M | re.S)


def test_the_search_finds_what_it_should(capsys: pytest.CaptureFixture[str]) -> None:
    code = CODE[0]
    assert len(code.splitlines()) <= 20
    exec(compile(code, str(PAGE), "exec"), {})
    answers = [line.partition(" -> ")[2] for line in capsys.readouterr().out.splitlines()]
    assert answers == [
        "Water boils at 100 degrees Celsius at sea level.",
        "The cat sleeps on the warm windowsill.",
        "Interest rates rose for the third time this year.",
    ]


def test_pickled_heads_are_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bge-m3").mkdir()
    for name in ("sparse_linear", "colbert_linear"):
        torch.save({"weight": torch.ones(2, 4), "bias": torch.zeros(2)}, f"bge-m3/{name}.pt")
    exec(compile(CODE[1], str(PAGE), "exec"), {})
    assert load_file("bge-m3/colbert_linear.safetensors")["weight"].shape == (2, 4)


async def test_the_requests_are_answered() -> None:
    requests = re.findall(r"^\$ curl localhost:8000(/\S+) -H '(.*?): (.*?)' -d '(.*)'$", TEXT, flags=re.M)
    assert len(requests) == TEXT.count("$ curl")
    async with serving(PoolingClient()) as session:
        for route, name, value, body in requests:
            answer = await session.post(route, headers={name: value}, content=body)
            assert answer.status_code == 200, answer.text
            given = json.loads(body)
            found = answer.json().get("data") or answer.json()["results"]
            assert len(found) == len(given.get("input") or given["documents"])
    assert [route for route, *_ in requests] == ["/v1/embeddings", "/rerank"]


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
