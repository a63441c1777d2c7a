"""PushedWeights: weights that a trainer pushes tensor by tensor, kept as a folder that engines load like any other.

So an engine that dies comes back with them, and they are checked as every checkpoint is. Torch-free.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import shutil
import struct
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec

from quire.loader.hub import ModelSource
from quire.loader.model_config import PICKLED
from quire.types.errors import RequestError

_INDEX_FILE = "model.safetensors.index.json"
_MOST_NAME = 512  # characters
_MOST_GROWTH, _SLACK = 4, 64 << 20  # float32 for what is stored in 8 bits; bytes beside that
# Safetensors' name of an element type -> torch's, and its bytes.
_TYPES = {
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
}
_BY_TORCH = {torch_name: name for name, (torch_name, _) in _TYPES.items()}


class TorchTensor(Protocol):
    """The part of a torch tensor that its bytes are taken by."""

    dtype: Any
    shape: Sequence[int]
    nbytes: int

    def detach(self) -> Self: ...

    def cpu(self) -> Self: ...

    def contiguous(self) -> Self: ...

    def data_ptr(self) -> int: ...


class PushedTensor(msgspec.Struct, frozen=True):
    """A tensor by the name that the model's checkpoint has for it; in JSON its bytes are base64."""

    name: str
    dtype: str  # as safetensors has it: F32, BF16, ...
    shape: list[int]
    data: bytes  # row by row, little-endian

    @classmethod
    def of(cls, name: str, tensor: TorchTensor) -> Self:
        stored = tensor.detach().cpu().contiguous()
        dtype = str(stored.dtype).removeprefix("torch.")
        if dtype not in _BY_TORCH:
            raise RequestError(f"{name} is of {dtype} but must be one of {', '.join(_BY_TORCH)}", "tensors")
        data = ctypes.string_at(stored.data_ptr(), stored.nbytes)
        return cls(name, _BY_TORCH[dtype], list(stored.shape), data)


class PushedWeights:
    """Not for use from several threads at once; `add` and `finish` write files. Gone with this object."""

    def __init__(self, source: ModelSource) -> None:
        """`source`: the model that is served, whose config and tokenizer stay."""
        if source.kind != "folder":
            raise RequestError(
                f"{source.name!r} is a .gguf file, whose tensors cannot be pushed; serve a folder with safetensors",
                "tensors",
            )
        self.path = Path(tempfile.mkdtemp(prefix="quire-pushed-"))  # only its owner may look into it
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        self._files: dict[str, str] = {}  # tensor -> the file that has it
        self.num_bytes = 0
        stored = 0
        for file in source.path.iterdir():
            if file.suffix == ".safetensors":
                stored += file.stat().st_size
            elif file.is_file() and file.name != _INDEX_FILE and file.suffix not in PICKLED:
                (self.path / file.name).symlink_to(file.resolve())
        self._most_bytes = _MOST_GROWTH * stored + _SLACK

    @property
    def num_tensors(self) -> int:
        return len(self._files)

    def add(self, tensors: Sequence[PushedTensor]) -> None:
        """RequestError, and none of them added, if one is not what it says or too large."""
        for index, tensor in enumerate(tensors):
            self._check(tensor, {each.name for each in tensors[:index]})
        total = sum(len(tensor.data) for tensor in tensors)
        if self.num_bytes + total > self._most_bytes:
            raise RequestError(
                f"{self.num_bytes + total} bytes were pushed; the weights that are served take at most"
                f" {self._most_bytes}",
                "tensors",
            )
        if not tensors:
            return
        header, end, digest = {}, 0, hashlib.sha256()
        for tensor in tensors:
            begin, end = end, end + len(tensor.data)
            header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
            digest.update(tensor.data)
        text = json.dumps(header).encode()
        # The model's digest has the names of files, so it covers all of these bytes.
        name = f"pushed-{self.num_tensors:06}-{digest.hexdigest()}.safetensors"
        with (self.path / name).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for tensor in tensors:
                file.write(tensor.data)
        self._files |= dict.fromkeys(header, name)
        self.num_bytes += total

    def finish(self) -> Path:
        """The folder, complete; whether its tensors are those of the model is for who loads it to find out."""
        if not self._files:
            raise RequestError("no tensors were pushed; push those of the model first", "tensors")
        (self.path / _INDEX_FILE).write_text(json.dumps({"weight_map": self._files}), encoding="utf-8")
        return self.path

    def discard(self) -> None:
        self._remove()

    def _check(self, tensor: PushedTensor, before: set[str]) -> None:
        name = tensor.name[:_MOST_NAME]
        if not name or len(tensor.name) > _MOST_NAME or not tensor.name.isprintable() or name == "__metadata__":
            raise RequestError(f"{name!r} is no name of a tensor", "tensors")
        if tensor.name in self._files or tensor.name in before:
            raise RequestError(f"{name} was pushed twice; push each tensor once, or start over", "tensors")
        if tensor.dtype not in _TYPES:
            raise RequestError(
                f"{name} has dtype {tensor.dtype!r} but must have one of {', '.join(_TYPES)}", "tensors"
            )
        wanted = math.prod(tensor.shape) * _TYPES[tensor.dtype][1]
        if min(tensor.shape, default=0) < 0 or wanted != len(tensor.data):
            raise RequestError(
                f"{name} has {len(tensor.data)} bytes; {tensor.dtype} of {tensor.shape} takes {wanted}", "tensors"
            )
