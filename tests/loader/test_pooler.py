"""What a folder of sentence-transformers says, and what is not understood of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.config.groups import ModelConfig
from quire.loader.hub import ModelSource
from quire.loader.pooler import read_pooler
from quire.types.errors import CheckpointError, ConfigError
from quire.types.pooling import PoolerConfig

TRANSFORMER, POOLING, NORMALIZE = (
    {"type": f"sentence_transformers.models.{kind}", "path": path}
    for kind, path in (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
)


def write(folder: Path, name: str, value: Any) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def read(
    folder: Path, *, is_encoder: bool = False, generates: bool = True, config: Any = None, **settings: Any
) -> PoolerConfig | None:
    source = ModelSource(folder, "folder", "m")
    return read_pooler(
        ModelConfig(**settings), source, config or {}, size=8, generates=generates, is_encoder=is_encoder
    )


@pytest.mark.parametrize(
    ("config", "dimensions"),
    [
        ({}, None),
        ({"is_matryoshka": True}, None),
        ({"is_matryoshka": False}, ()),
        ({"matryoshka_dimensions": [2, 4], "is_matryoshka": True}, (2, 4)),
    ],
)
def test_sizes_of_matryoshka_vectors(config: Any, dimensions: Any, tmp_path: Path) -> None:
    for files in ([], [TRANSFORMER, POOLING]):
        if files:
            write(tmp_path, "modules.json", files)
        found = read(tmp_path, runner="pooling", config=config)
        assert found is not None
        assert found.dimensions == dimensions
    with pytest.raises(ConfigError, match="matryoshka_dimensions is 7 but must be a list"):
        read(tmp_path, runner="pooling", config={"matryoshka_dimensions": 7})


def test_without_the_files_the_architecture_and_the_settings_decide(tmp_path: Path) -> None:
    assert read(tmp_path) is None
    assert read(tmp_path, runner="pooling") == PoolerConfig("last", 8)
    assert read(tmp_path, convert="embed") == PoolerConfig("last", 8)
    assert read(tmp_path, generates=False, is_encoder=True) == PoolerConfig("cls", 8)


def test_the_files_are_read(tmp_path: Path) -> None:
    write(tmp_path, "modules.json", [TRANSFORMER, POOLING, NORMALIZE])
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False})
    write(tmp_path, "sentence_bert_config.json", {"max_seq_length": 256, "do_lower_case": False})
    prompts = {"query": "q: "}
    write(tmp_path, "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "query"})
    assert read(tmp_path) == PoolerConfig("mean", 8, True, prompts, "query", 256)
    assert read(tmp_path, runner="generate") is None
    write(tmp_path, "modules.json", [TRANSFORMER, POOLING])
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode": "lasttoken"})
    found = read(tmp_path)
    assert found is not None
    assert (found.kind, found.normalize) == ("last", False)


@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        (
            "modules.json",
            [TRANSFORMER, {"type": "sentence_transformers.models.CNN"}],
            ConfigError,
            "module 'CNN'",
        ),
        ("modules.json", {"a": 1}, CheckpointError, "modules.json cannot be used"),
        ("modules.json", [{"type": "x.Pooling", "path": "../other"}], CheckpointError, "is outside of it"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, ConfigError, "pools by pooling_mode_max_tokens"),
        ("1_Pooling/config.json", {"include_prompt": False}, ConfigError, "include_prompt"),
        ("config_sentence_transformers.json", {"default_prompt_name": "q"}, CheckpointError, "names the prompt 'q'"),
        ("sentence_bert_config.json", {"max_seq_length": "long"}, CheckpointError, "max_seq_length"),
    ],
)
def test_what_is_not_understood_is_named(
    tmp_path: Path, name: str, value: Any, error: type[Exception], words: str
) -> None:
    write(tmp_path, "modules.json", [TRANSFORMER, POOLING])
    write(tmp_path, name, value)
    with pytest.raises(error, match=words):
        read(tmp_path)
