"""The GGUF container: metadata, the tensor table and raw bytes. Knows neither torch nor any architecture."""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.loader.mapped import MappedFile
from quire.types.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4  # ggml's own limit

# ggml type id -> (name, values per block, bytes per block)
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}

_BOOL, _STRING, _ARRAY = 7, 8, 9
SKIPPED: list[str] = []  # stands for an array that was stepped over
# metadata value type id -> struct format; bool, string and array are read by their own methods
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q", 12: "<d"}


@dataclass(frozen=True)
class GgufTensor:
    name: str  # as in the file
    shape: tuple[int, ...]  # torch order: the contiguous dimension last
    type: str  # a name of TENSOR_TYPES, such as "Q4_1"
    offset: int  # of the first byte, from the start of the file
    num_bytes: int


class GgufFile:
    """A little-endian GGUF file of version 2 or 3, mapped read-only.

    Metadata arrays are Python lists. Strings are decoded as UTF-8 with `surrogateescape`, so that a value
    which is not valid UTF-8 is kept and `value.encode("utf-8", "surrogateescape")` gives its bytes back.
    Opening checks that every tensor lies inside the file. Without `string_arrays` those are stepped over and absent
    from the metadata: vocabularies take most of the time and memory, and only tokenizers need them.
    """

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def __init__(self, path: str | Path, *, string_arrays: bool = True) -> None:
        self.path = Path(path)
        self._file = MappedFile(self.path)
        self.size = self._file.size
        reader = _Reader(self.path, self._file.buffer, self.size)
        num_tensors, num_metadata = reader.header()
        metadata = reader.metadata(num_metadata, string_arrays)
        self.metadata = {key: value for key, value in metadata.items() if value is not SKIPPED}
        self._check_not_split()
        self.tensors = reader.tensors(num_tensors, self._alignment())

    def data(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """The tensor's stored bytes: a view of the mapped file, no copy. Not to be written to."""
        return self._file.view(tensor.offset, tensor.num_bytes)

    def release(self, tensor: GgufTensor) -> None:
        """The tensor was copied: its pages need not stay in memory. It can still be read again."""
        self._file.release(tensor.offset, tensor.num_bytes)

    def release_all(self) -> None:
        self._file.release(0, self.size)

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self.path}: general.alignment is {alignment!r}; it must be at least 1")
        return alignment

    def _check_not_split(self) -> None:
        parts = self.metadata.get("split.count", 0)
        if isinstance(parts, int) and parts > 1:
            raise CheckpointError(
                f"{self.path} is one of {parts} parts of a split GGUF; merge them into one file first "
                f"(llama-gguf-split --merge FIRST_PART OUTPUT)"
            )


def read_metadata(path: str | Path) -> dict[str, Any]:
    """The metadata of a GGUF file; see GgufFile for how values are decoded."""
    return GgufFile(path).metadata


class _Reader:
    """Reads the header part front to back; every read is checked against the end of the file."""

    def __init__(self, path: Path, buffer: mmap.mmap, size: int) -> None:
        self.path = path
        self.buffer = buffer
        self.size = size
        self.position = 0

    def header(self) -> tuple[int, int]:
        """Check magic and version; return the number of tensors and of metadata entries."""
        magic = self.buffer[:4]
        if magic != MAGIC:
            raise CheckpointError(
                f"{self.path} is not a GGUF file: it starts with {magic!r} instead of {MAGIC!r}; "
                f"download it again or give another file"
            )
        self.position = 4
        version = self._unpack("<I")
        if version & 0xFFFF == 0:
            raise CheckpointError(
                f"{self.path} is a big-endian GGUF file; only little-endian files can be read: convert it "
                f"with gguf-py's gguf_convert_endian.py"
            )
        if version not in VERSIONS:
            raise CheckpointError(
                f"{self.path} has GGUF version {version}; versions 2 and 3 can be read: convert it again"
            )
        return self._unpack("<Q"), self._unpack("<Q")

    def metadata(self, count: int, string_arrays: bool) -> dict[str, Any]:
        self.string_arrays = string_arrays
        values: dict[str, Any] = {}
        for _ in range(count):
            key = self._string()
            values[key] = self._value(key, self._unpack("<I"))
        return values

    def tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        entries = []
        for _ in range(count):
            name = self._string()
            num_dims = self._unpack("<I")
            if num_dims > MAX_DIMENSIONS:
                raise self._corrupt(f"tensor {name!r} has {num_dims} dimensions, at most {MAX_DIMENSIONS}")
            dims = tuple(self._unpack("<Q") for _ in range(num_dims))
            entries.append((name, dims[::-1], self._unpack("<I"), self._unpack("<Q")))
        data_start = -(-self.position // alignment) * alignment
        found: dict[str, GgufTensor] = {}
        for name, shape, type_id, offset in entries:
            if name in found:
                raise self._corrupt(f"tensor {name!r} is listed twice")
            found[name] = self._tensor(name, shape, type_id, data_start + offset)
        return found

    def _tensor(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> GgufTensor:
        if type_id not in TENSOR_TYPES:
            known = ", ".join(known_name for known_name, _, _ in TENSOR_TYPES.values())
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has the unknown type number {type_id}; known types: {known}"
            )
        type_name, block_values, block_bytes = TENSOR_TYPES[type_id]
        if shape and shape[-1] % block_values:
            raise self._corrupt(
                f"tensor {name!r} of type {type_name} has rows of {shape[-1]} values, not a multiple of "
                f"{block_values}"
            )
        num_bytes = math.prod(shape) // block_values * block_bytes
        if offset + num_bytes > self.size:
            raise CheckpointError(
                f"{self.path} is truncated: tensor {name!r} needs the file to have at least "
                f"{offset + num_bytes} bytes but it has {self.size}; download it again"
            )
        return GgufTensor(name, shape, type_name, offset, num_bytes)

    def _value(self, key: str, type_id: int) -> Any:
        if type_id == _STRING:
            return self._string()
        if type_id == _ARRAY:
            return self._array(key)
        if type_id == _BOOL:
            return bool(self._unpack("<B"))
        if type_id not in _SCALARS:
            raise self._corrupt(f"metadata key {key!r} has the unknown value type {type_id}")
        return self._unpack(_SCALARS[type_id])

    def _array(self, key: str) -> list[Any]:
        item_type, count = self._unpack("<I"), self._unpack("<Q")
        if item_type == _STRING:
            return self._strings(count) if self.string_arrays else self._skip_strings(count)
        if item_type != _BOOL and item_type not in _SCALARS:
            raise self._corrupt(f"metadata array {key!r} has the unsupported item type {item_type}")
        dtype = np.dtype("?" if item_type == _BOOL else _SCALARS[item_type])
        start = self._advance(count * dtype.itemsize)
        items: list[Any] = np.frombuffer(self.buffer, dtype, count, start).tolist()
        return items

    def _strings(self, count: int) -> list[str]:
        """An array of strings: vocabularies have 10^5 of them, so start-up waits for this loop."""
        length_at = struct.Struct("<Q").unpack_from
        buffer, size, position = self.buffer, self.size, self.position
        items: list[str] = []
        for _ in range(count):
            start = position + 8
            if start > size:
                raise self._ended()
            position = start + length_at(buffer, position)[0]
            if position > size:
                raise self._ended()
            items.append(buffer[start:position].decode("utf-8", "surrogateescape"))
        self.position = position
        return items

    def _skip_strings(self, count: int) -> list[str]:
        length_at = struct.Struct("<Q").unpack_from
        buffer, size, position = self.buffer, self.size, self.position
        for _ in range(count):
            if position + 8 > size:
                raise self._ended()
            position += 8 + length_at(buffer, position)[0]
        if position > size:
            raise self._ended()
        self.position = position
        return SKIPPED

    def _string(self) -> str:
        length = self._unpack("<Q")
        start = self._advance(length)
        return self.buffer[start : start + length].decode("utf-8", "surrogateescape")

    def _unpack(self, fmt: str) -> Any:
        return struct.unpack_from(fmt, self.buffer, self._advance(struct.calcsize(fmt)))[0]

    def _advance(self, num_bytes: int) -> int:
        """Step over bytes that must exist; return where they start."""
        start = self.position
        if num_bytes > self.size - start:
            raise self._ended()
        self.position = start + num_bytes
        return start

    def _ended(self) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is truncated: its {self.size} bytes end inside the header, where more than that is "
            f"expected; download it again"
        )

    def _corrupt(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is corrupt: {what}; download it again")
