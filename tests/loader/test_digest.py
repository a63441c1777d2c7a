"""The digest of a model: equal for equal files, and different for those that differ in more than a trifle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.config.groups import ModelConfig
from quire.loader.digest import model_digest
from quire.loader.hub import ModelSource

SIZE = 8 << 20


def folder(path: Path, weights: bytes, names: str = "a") -> ModelSource:
    path.mkdir()
    header = json.dumps({names: {"dtype": "U8", "shape": [len(weights)], "data_offsets": [0, len(weights)]}}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + weights)
    (path / "config.json").write_text("{}")
    return ModelSource(path, "folder", str(path))


def digest(source: ModelSource) -> str:
    return model_digest(source, ModelConfig(model=str(source.path)))


@pytest.mark.parametrize("part", range(10))
def test_a_tensor_that_differs_is_seen_wherever_it_lies(tmp_path: Path, part: int) -> None:
    weights = bytearray(SIZE)
    before = digest(folder(tmp_path / "a", bytes(weights)))
    begin, length = SIZE * part // 11, SIZE // 126
    weights[begin : begin + length] = b"\1" * length
    assert digest(folder(tmp_path / "b", bytes(weights))) != before


def test_equal_files_are_equal_wherever_they_lie_and_names_count(tmp_path: Path) -> None:
    first, same, other = (
        digest(folder(tmp_path / name, bytes(100_000), tensor))
        for name, tensor in (("a", "x"), ("b", "x"), ("c", "y"))
    )
    assert first == same != other
