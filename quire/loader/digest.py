"""A digest that names a model's content without reading all of it: sizes, headers and samples of each file."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from quire.config.groups import ModelConfig
from quire.loader.hub import ModelSource

_HEADER = 4 << 20  # bytes at most of a safetensors file's header, which names its tensors and their places
_NUM_SAMPLES = 128  # of a weight file, evenly over it, its beginning and its end among them
_SAMPLE = 16 << 10  # bytes of each
_SUFFIXES = (".safetensors", ".gguf", ".bin")
_CONFIGS = ("config.json",)


def model_digest(source: ModelSource, config: ModelConfig) -> str:
    """Equal for equal files, wherever they lie. Weights that are made up count by their seed.

    Files that differ in 1 part in 127 of their bytes, one after the other, have different digests; a smaller change
    may lie between two samples.
    """
    made_up = config.load_format == "dummy"
    digest = blake2b(f"dummy {config.seed}".encode() if made_up else b"files", digest_size=16)
    for path in _files(source.path, made_up):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if path.suffix not in _SUFFIXES:
                digest.update(file.read())
                continue
            if path.suffix == ".safetensors":
                length = int.from_bytes(file.read(8), "little")
                digest.update(file.read(min(length, _HEADER)))
            last = max(0, size - _SAMPLE)
            for begin in sorted({last * index // (_NUM_SAMPLES - 1) for index in range(_NUM_SAMPLES)}):
                file.seek(begin)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def _files(path: Path, made_up: bool) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(
        file for file in path.iterdir() if file.name in _CONFIGS or (file.suffix in _SUFFIXES and not made_up)
    )
