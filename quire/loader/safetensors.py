"""SafetensorsCheckpoint: a Hugging Face folder with one safetensors file, or several and their index; or one file."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from quire.loader.checkpoint import Checkpoint, TensorInfo, natural_key
from quire.loader.mapped import MappedFile
from quire.loader.model_config import PICKLED, read_config_file, read_json
from quire.types.errors import CheckpointError
from quire.utils.schema import decode_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


_MAX_HEADER = 100_000_000  # bytes, the limit of the format's own library

_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct):
    """What a header says of one tensor."""

    dtype: str
    shape: list[_Size]
    data_offsets: tuple[_Size, _Size]


class SafetensorsCheckpoint(Checkpoint):
    """Headers are read at once; a file's data is mapped when its first tensor is asked for."""

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder)
        self._only = path if path.is_file() else None
        self.folder = path.parent if self._only else path
        self.config = read_config_file(self.folder)
        infos: dict[str, TensorInfo] = {}
        self._files: dict[str, Path] = {}
        self._starts: dict[str, int] = {}  # offset of the first byte in the file
        self._open: dict[Path, MappedFile] = {}
        for path, names in self._shards().items():
            header, starts = read_header(path)
            _check_names(path, names, set(header))
            infos |= header
            self._starts |= starts
            self._files |= dict.fromkeys(header, path)
        self._infos = {name: infos[name] for name in sorted(infos, key=natural_key)}

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def get(self, name: str) -> Tensor:
        if name not in self._files:
            raise CheckpointError(f"{self.folder} has no tensor {name!r}")
        info, stored = self._infos[name], self._mapped(name).view(self._starts[name], self._infos[name].num_bytes)
        if stored.ctypes.data % info.dtype.itemsize:
            stored = stored.copy()  # the format aligns nothing, torch assumes alignment
        return torch.from_numpy(stored).view(info.dtype).view(info.shape)

    def release(self, name: str) -> None:
        self._mapped(name).release(self._starts[name], self._infos[name].num_bytes)

    def release_all(self) -> None:
        for file in self._open.values():
            file.release(0, file.size)

    def _mapped(self, name: str) -> MappedFile:
        path = self._files[name]
        if path not in self._open:
            self._open[path] = MappedFile(path)
        return self._open[path]

    def _shards(self) -> dict[Path, set[str] | None]:
        """Each file and the tensors that the index expects in it (None: there is no index)."""
        index_path = self.folder / INDEX_FILE
        if self._only is not None:
            return {self._only: None}
        if (self.folder / SINGLE_FILE).is_file():
            return {self.folder / SINGLE_FILE: None}
        if index_path.is_file():
            return self._indexed(index_path)
        files = sorted(self.folder.glob("*.safetensors"))
        if len(files) == 1:
            return {files[0]: None}
        others = sorted(path.name for path in self.folder.iterdir() if path.suffix in PICKLED)
        hint = (
            f"; it has {', '.join(others)}, which are pickled (they could run code): convert them to safetensors"
            if others
            else ""
        )
        raise CheckpointError(
            f"{self.folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{hint or '; download the model again'}"
        )

    def _indexed(self, index_path: Path) -> dict[Path, set[str] | None]:
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index_path} has no weight_map; download it again")
        shards: dict[Path, set[str]] = {}
        for name, file_name in weight_map.items():
            if not _is_inside(file_name):
                raise CheckpointError(
                    f"{index_path}: weight_map has {name!r} in {_short(file_name)}; it must name a file in the"
                    " model's folder; download the file again"
                )
            shards.setdefault(self.folder / file_name, set()).add(name)
        missing = [path.name for path in shards if not path.is_file()]
        if missing:
            raise CheckpointError(
                f"{self.folder} lacks {len(missing)} of the {len(shards)} files that {INDEX_FILE} names: "
                f"{', '.join(sorted(missing))}; download them"
            )
        return {path: shards[path] for path in sorted(shards)}


def _is_inside(file_name: Any) -> bool:
    """Whether it names a file below the folder that it is relative to. It may be a link, as in the hub's cache."""
    if not isinstance(file_name, str):
        return False
    parts = Path(file_name).parts
    return bool(parts) and ".." not in parts and not Path(file_name).is_absolute()


def _check_names(path: Path, expected: set[str] | None, found: set[str]) -> None:
    if expected is None or expected == found:
        return
    absent, extra = sorted(expected - found), sorted(found - expected)
    details = [f"it lacks {', '.join(absent[:5])} ({len(absent)} in all)"] if absent else []
    details += [f"it also has {', '.join(extra[:5])} ({len(extra)} in all)"] if extra else []
    raise CheckpointError(
        f"{path} does not hold the tensors that {INDEX_FILE} names: {'; '.join(details)}; download both again"
    )


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, int]]:
    """Names, shapes and types of one file, checked against its size, and where each tensor starts."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise CheckpointError(
                    f"{path} is truncated or not a safetensors file: its header needs {8 + length} bytes but the "
                    f"file has {size}; download it again"
                )
            if length > _MAX_HEADER:
                raise CheckpointError(
                    f"{path} has a header of {length} bytes but the format allows {_MAX_HEADER}; download it again"
                )
            header = decode_json(file.read(length))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; check the file") from error
    except ValueError as error:
        raise CheckpointError(f"{path} has a corrupt header ({error}); download it again") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a corrupt header (a {type(header).__name__}); download it again")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, value) for name, value in header.items()}
    infos = {name: _tensor_info(path, name, entry) for name, entry in entries.items()}
    end = 8 + length + _check_packed(path, entries)
    if end != size:
        raise CheckpointError(
            f"{path} is truncated or damaged: its header describes {end} bytes but the file has {size}; "
            f"download it again"
        )
    return infos, {name: 8 + length + entry.data_offsets[0] for name, entry in entries.items()}


def write_safetensors(path: Path, tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Write tensors as they come, none kept in memory; return their bytes.

    Their header stands before them, so they go into a file beside `path` first.
    """
    names, header, end = {dtype: name for name, dtype in _DTYPES.items()}, {}, 0
    data = path.with_suffix(".data")
    try:
        with data.open("wb") as file:
            for name, tensor in tensors:
                values = tensor.contiguous().flatten().view(torch.uint8).numpy()
                offsets = (end, end + values.nbytes)
                header[name] = _Entry(names[tensor.dtype], list(tensor.shape), offsets)
                file.write(values.data)
                end = offsets[1]
        start = msgspec.json.encode({"__metadata__": {"format": "pt"}, **header})
        start += b" " * (-len(start) % 8)
        with path.open("wb") as file, data.open("rb") as source:
            file.write(len(start).to_bytes(8, "little") + start)
            shutil.copyfileobj(source, file, 1 << 24)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror}; check the folder and its free space"
        ) from error
    finally:
        data.unlink(missing_ok=True)
    return end


def _entry(path: Path, name: str, value: Any) -> _Entry:
    try:
        return msgspec.convert(value, _Entry)
    except msgspec.ValidationError as error:
        raise CheckpointError(
            f"{path}: tensor {name!r} is {_short(value)} in the header ({error}); download the file again"
        ) from error


def _tensor_info(path: Path, name: str, entry: _Entry) -> TensorInfo:
    if entry.dtype not in _DTYPES:
        raise CheckpointError(
            f"{path}: tensor {name!r} has type {entry.dtype}; supported types: {', '.join(_DTYPES)}"
        )
    dtype, shape = _DTYPES[entry.dtype], tuple(entry.shape)
    begin, end = entry.data_offsets
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(
            f"{path}: tensor {name!r} of shape {list(shape)} and type {entry.dtype} needs "
            f"{math.prod(shape) * dtype.itemsize} bytes but has {begin} to {end}; download the file again"
        )
    return TensorInfo(shape, dtype, end - begin)


def _check_packed(path: Path, entries: Mapping[str, _Entry]) -> int:
    """Return where the data ends. There are no overlaps and no holes: a tensor begins where another one ends."""
    end, before = 0, "the data begins at"
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if entry.data_offsets[0] != end:
            begin = entry.data_offsets[0]
            raise CheckpointError(
                f"{path}: tensor {name!r} begins at {begin} but {before} {end}; download the file again"
            )
        end, before = entry.data_offsets[1], f"{name!r} ends at"
    return end


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 120 else f"{shown[:120]}..."
