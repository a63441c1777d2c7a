"""Says what a model on this machine is, from its headers alone: format, family, size, parameters, quantization."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.loader.gguf_config import config_from_gguf
from quire.loader.gguf_file import GgufFile
from quire.loader.hub import ModelSource
from quire.loader.model_config import read_config_file
from quire.types.errors import CheckpointError
from quire.utils.schema import decode_json

_WEIGHTS = "*.safetensors"
_LARGEST_HEADER = 100 << 20  # bytes, as the format has it


@dataclass(frozen=True)
class ModelDescription:
    """What can be said of a model without loading it; empty or None where it is not known."""

    format: str = ""
    architecture: str = ""  # by its name in Hugging Face configs
    family: str = ""  # such as llama
    num_parameters: int | None = None
    quantization: str = ""  # of most weights, such as Q4_1 or BF16
    num_bytes: int = 0  # of its weights on disk
    modified: float = 0.0  # seconds since 1970
    context_length: int | None = None
    embedding_length: int | None = None
    digest: str = ""

    @property
    def parameter_size(self) -> str:
        """The number of parameters as people write it: 134.5M, 8.0B."""
        if self.num_parameters is None:
            return ""
        for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
            if self.num_parameters >= size:
                return f"{self.num_parameters / size:.1f}{unit}"
        return str(self.num_parameters)


UNKNOWN = ModelDescription()


def describe_model(source: ModelSource) -> ModelDescription:
    """Read the model's headers. CheckpointError if they cannot be read."""
    files = [source.path] if source.kind == "gguf" else sorted(source.path.glob(_WEIGHTS))
    if source.kind == "gguf":
        gguf = GgufFile(source.path, string_arrays=False)
        config = config_from_gguf(gguf)
        family = str(gguf.metadata.get("general.architecture", ""))
        counts = Counter[str]()
        for tensor in gguf.tensors.values():
            counts[tensor.type] += math.prod(tensor.shape)
    else:
        config = read_config_file(source.path)
        family = str(config.get("model_type", ""))
        counts = sum((_stored_types(file) for file in files), Counter[str]())
    method = (config.get("quantization_config") or {}).get("quant_method")
    context, embedding = _size(config, "max_position_embeddings"), _size(config, "hidden_size")
    return ModelDescription(
        format="gguf" if source.kind == "gguf" else "safetensors",
        architecture=str((config.get("architectures") or [""])[0]),
        family=family,
        # Packed weights hold several parameters in one stored number.
        num_parameters=sum(counts.values()) or None if method is None else None,
        quantization=str(method)
        if method is not None
        else next(iter([name for name, _ in counts.most_common(1)]), ""),
        num_bytes=sum(file.stat().st_size for file in files),
        modified=max((file.stat().st_mtime for file in files), default=source.path.stat().st_mtime),
        context_length=context,
        embedding_length=embedding,
        digest=_digest(files),
    )


def _size(config: dict[str, Any], name: str) -> int | None:
    value = config.get(name) or (config.get("text_config") or {}).get(name)
    return value if isinstance(value, int) else None


def _stored_types(file: Path) -> Counter[str]:
    """How many numbers of each type a safetensors file holds."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > _LARGEST_HEADER:
            raise CheckpointError(f"{file} has a header of {length} bytes; it is damaged: download it again")
        try:
            header = decode_json(opened.read(length))
        except ValueError as error:
            raise CheckpointError(f"{file} has no readable header ({error}); download it again") from error
    counts = Counter[str]()
    for name, entry in header.items() if isinstance(header, dict) else ():
        if name != "__metadata__" and isinstance(entry, dict):
            counts[str(entry.get("dtype"))] += math.prod(entry.get("shape") or ())
    return counts


def _digest(files: list[Path]) -> str:
    """Names a state of the files by their names, sizes and times: reading all of their bytes would take minutes."""
    states = [(file.name, (state := file.stat()).st_size, state.st_mtime_ns) for file in files]
    return hashlib.sha256(repr(states).encode()).hexdigest()
