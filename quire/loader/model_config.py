"""Reads a model's config without its weights. Torch-free, for the frontend and for `quire fit`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.loader.aliases import suggested_sampling
from quire.loader.config_schema import ConfigSchema
from quire.loader.gguf_config import config_from_gguf, sampling_from_gguf
from quire.loader.gguf_file import GgufFile
from quire.loader.hub import ModelSource
from quire.types.errors import CheckpointError
from quire.utils.schema import check_values, decode_json

_OWN_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}  # of AutoGPTQ and AutoAWQ
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")  # files that are never read


def load_config(source: ModelSource) -> dict[str, Any]:
    """The keys of config.json, whatever the source is."""
    if source.kind == "gguf":
        return config_from_gguf(GgufFile(source.path, string_arrays=False))
    return read_config_file(source.path)


def read_config_file(folder: Path) -> dict[str, Any]:
    """The keys of a folder's config.json, whose values are ones that models can have."""
    path = folder / "config.json"
    config = read_json(path)
    if config.get("quantization_config") is None:
        _take_quantization(folder, config)
    check_values(path, config, ConfigSchema, CheckpointError)
    return config


def _take_quantization(folder: Path, config: dict[str, Any]) -> None:
    """Some tools write `quantization_config` under another key, or into a file of its own."""
    text = config.get("text_config")
    for values, key in ((config, "compression_config"), (text, "quantization_config")):
        if isinstance(values, dict) and values.get(key) is not None:
            config["quantization_config"] = values[key]
            return
    for name, method in _OWN_FILES.items():
        found = read_optional_json(folder / name)
        if found:
            config["quantization_config"] = {"quant_method": method, **found}
            return
    described = read_optional_json(folder / "hf_quant_config.json").get("quantization")
    if isinstance(described, dict) and described.get("quant_algo") is not None:
        config["quantization_config"] = {"quant_method": "modelopt", **described}


def load_generation_config(source: ModelSource) -> dict[str, Any]:
    """The keys of generation_config.json, or of them what a GGUF file or its authors suggest; empty if there is none.

    Tokens that end an answer are the tokenizer's in a GGUF file.
    """
    if source.kind == "gguf":
        found = sampling_from_gguf(GgufFile(source.path, string_arrays=False))
        return found or dict(suggested_sampling(source.path.name))
    return read_optional_json(source.path / "generation_config.json")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file that must exist."""
    try:
        value = decode_json(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; download the model again with this file") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; check the file") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__} instead of an object; download it again")
    return value


def read_optional_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file that a model may lack."""
    return read_json(path) if path.is_file() else {}
