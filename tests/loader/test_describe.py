"""What a model is, from its headers: GGUF files and safetensors folders, plain and quantized."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.loader.describe import ModelDescription, describe_model
from quire.loader.hub import ModelSource
from quire.types.errors import CheckpointError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 10,
    "max_position_embeddings": 256,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


def write(folder: Path, name: str, tensors: dict[str, tuple[str, list[int]]]) -> None:
    entries = {
        key: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]} for key, (dtype, shape) in tensors.items()
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    (folder / name).write_bytes(len(header).to_bytes(8, "little") + header)


def test_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write(tmp_path, "a.safetensors", {"w": ("BF16", [1000, 64]), "n": ("F32", [64])})
    write(tmp_path, "b.safetensors", {"v": ("BF16", [500, 64])})
    found = describe_model(ModelSource(tmp_path, "folder", "x"))
    assert (found.format, found.family, found.architecture) == ("safetensors", "llama", "LlamaForCausalLM")
    assert (found.num_parameters, found.parameter_size, found.quantization) == (96064, "96.1K", "BF16")
    assert (found.context_length, found.embedding_length) == (256, 64)
    assert found.num_bytes == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    before = found.digest
    write(tmp_path, "b.safetensors", {"v": ("BF16", [501, 64]), "u": ("F32", [1])})
    assert describe_model(ModelSource(tmp_path, "folder", "x")).digest != before


def test_packed_weights_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": {"quant_method": "gptq"}}))
    write(tmp_path, "a.safetensors", {"w": ("I32", [1000, 64])})
    found = describe_model(ModelSource(tmp_path, "folder", "x"))
    assert (found.num_parameters, found.parameter_size, found.quantization) == (None, "", "gptq")


def test_a_damaged_header_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for content in (b"\xff" * 8, (4).to_bytes(8, "little") + b"nope"):
        (tmp_path / "a.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"a\.safetensors"):
            describe_model(ModelSource(tmp_path, "folder", "x"))


@pytest.mark.parametrize(("count", "text"), [(999, "999"), (134_515_008, "134.5M"), (8_030_261_248, "8.0B")])
def test_sizes_for_people(count: int, text: str) -> None:
    assert ModelDescription(num_parameters=count).parameter_size == text
