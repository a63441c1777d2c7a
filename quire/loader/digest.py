"""A digest that names a model's content without reading all of it: sizes, headers and samples of each file."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from quire.config.groups import ModelConfig
from quire.loader.hub import ModelSource

_SAMPLE = 64 << 10  # bytes; of a weight file its beginning, where tensors are named, its middle and its end
_SUFFIXES = (".safetensors", ".gguf", ".bin")
_CONFIGS = ("config.json",)


def model_digest(source: ModelSource, config: ModelConfig) -> str:
    """Equal for equal files, wherever they lie. Weights that are made up count by their seed."""
    made_up = config.load_format == "dummy"
    digest = blake2b(f"dummy {config.seed}".encode() if made_up else b"files", digest_size=16)
    for path in _files(source.path, made_up):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if path.suffix not in _SUFFIXES:
                digest.update(file.read())
                continue
            for begin in (0, size // 2, max(0, size - _SAMPLE)):
                file.seek(begin)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def _files(path: Path, made_up: bool) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(
        file for file in path.iterdir() if file.name in _CONFIGS or (file.suffix in _SUFFIXES and not made_up)
    )
