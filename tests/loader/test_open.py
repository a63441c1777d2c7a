from __future__ import annotations

from pathlib import Path

import pytest

from quire.loader.gguf import GgufCheckpoint
from quire.loader.hub import resolve_model
from quire.loader.model_config import load_config
from quire.loader.open import open_checkpoint
from quire.loader.safetensors import SafetensorsCheckpoint
from quire.types.errors import CheckpointError
from tests.loader.gguf_tiny import tiny_hf_model, write_tiny_gguf


def test_the_kind_decides_and_the_config_is_the_same_without_weights(tmp_path: Path) -> None:
    tiny_hf_model("qwen3").save_pretrained(tmp_path / "folder")
    write_tiny_gguf("qwen3", tmp_path / "model.gguf")
    for name, kind in (("folder", SafetensorsCheckpoint), ("model.gguf", GgufCheckpoint)):
        source = resolve_model(str(tmp_path / name))
        checkpoint = open_checkpoint(source)
        assert isinstance(checkpoint, kind)
        assert checkpoint.config == load_config(source)
        assert checkpoint.config["architectures"] == ["Qwen3ForCausalLM"]


def test_both_kinds_hold_the_same_tensors(tmp_path: Path) -> None:
    tiny_hf_model("llama-bias").save_pretrained(tmp_path / "folder")
    write_tiny_gguf("llama-bias", tmp_path / "model.gguf")
    folder, file = (open_checkpoint(resolve_model(str(tmp_path / name))) for name in ("folder", "model.gguf"))
    assert folder.tensors() == file.tensors()
    for name in folder.tensors():
        assert folder.get(name).equal(file.get(name)), name


def test_a_config_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        load_config(resolve_model(str(tmp_path)))
