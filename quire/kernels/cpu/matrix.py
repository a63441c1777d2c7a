"""Packed weight matrices and matmuls with them: rows of activations times weights that stay quantized in memory.

Knows formats and bytes, not layers or files. Every output element is summed in one order whatever the number of rows.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.cpu.library import bound, multiplies_integers
from quire.kernels.cpu.tracing import empty
from quire.types.errors import CheckpointError, ConfigError

PANEL = 16  # outputs that lie side by side in memory

# The numbers are those of panels.h. A suffix _min means that groups have a minimum, _f32 that scales are float32, as
# all are after code8_f32, and _k that they are integers times a float16 for each 256.
FORMATS = (
    *("float32", "bfloat16", "float16"),
    *("code4", "code4_min", "code4_min_f32"),
    *("code8", "code8_min", "code8_min_f32", "code8_f32"),
    *("code4_min_16", "e2m1", "e2m1_16", "nf4", "fp4", "e4m3", "e5m2"),
    *("code4_min_k", "code8_min_k", "code8_k", "code8_32"),
)
FLOAT8 = ("e4m3", "e5m2")
# Codes that are integers, or become integers: what rounded activations are multiplied with.
_INTEGERS = (*FORMATS[3:10], "e2m1", "e2m1_16", *FORMATS[17:])
_HALF_SCALES = ("code4", "code4_min", "code8", "code8_min")
# GGUF type -> its number in pack.cpp is its place here; values and bytes of a block, and the format it becomes.
BLOCK_TYPES: dict[str, tuple[int, int, str]] = {
    "Q4_0": (32, 18, "code4"),
    "Q4_1": (32, 20, "code4_min"),
    "Q5_0": (32, 22, "code8"),
    "Q5_1": (32, 24, "code8_min"),
    "Q8_0": (32, 34, "code8"),
    "Q4_K": (256, 144, "code4_min_k"),
    "Q5_K": (256, 176, "code8_min_k"),
    "Q6_K": (256, 210, "code8_k"),
}
# What float weights can be stored as.
STORAGES: dict[str, str] = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "int8": "code8",
    "int4": "code4_min",
}
# Kernels by what activations are rounded to.
KERNEL_PREFIXES = {"float32": "", "int16": "integer_", "int8": "byte_"}
_SOURCES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 32  # the inner size is padded to a multiple of it
_ROWS = 1024  # packed at a time, so that intermediate results stay small


def packed_bytes(source: str, rows: int, inner: int) -> int:
    """Bytes of a packed [rows, inner] matrix of a GGUF type, a storage or a format ("Q4_K", "int8", "code4")."""
    name = BLOCK_TYPES[source][2] if source in BLOCK_TYPES else STORAGES.get(source, source)
    size = ctypes.c_int64()
    bound().panel_bytes(FORMATS.index(name), inner, ctypes.addressof(size))
    return -(-rows // PANEL) * size.value


class Arena:
    """Memory for panels, in chunks of huge pages where the system has them; measured 8 % faster for one row.

    A chunk is given back when the last tensor in it is gone.
    """

    CHUNK = 32 << 20
    PAGE = 2 << 20

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._lock = threading.Lock()

    def allocate(self, num_bytes: int) -> Tensor:
        """A new tensor [num_bytes] uint8, aligned to 64 bytes."""
        with self._lock:
            if self._used + num_bytes > self._chunk.numel():
                self._chunk, self._used = self._map(max(num_bytes, self.CHUNK)), 0
            start = self._used
            self._used += -(-num_bytes // 64) * 64
            return self._chunk[start : start + num_bytes]

    def _map(self, num_bytes: int) -> Tensor:
        size = -(-num_bytes // self.PAGE) * self.PAGE
        if sys.platform != "linux":
            return torch.empty(size, dtype=torch.uint8)
        # One page more than needed, so that huge pages can start at their own boundary.
        memory = mmap.mmap(-1, size + self.PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel built without them serves small pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        start = -whole.data_ptr() % self.PAGE
        return whole[start : start + size]


_arena = Arena()


class PackedMatrix:
    """A matrix [rows, inner] of weights in panels of 16 rows, in one of FORMATS."""

    def __init__(self, panels: Tensor, format: str, rows: int, inner: int, order: Tensor | None = None) -> None:
        self.panels = panels  # [bytes] uint8
        self.format = format
        self.rows = rows
        self.inner = inner
        self.order = order  # [inner] int32: the column that stands at each place; None: its own

    @classmethod
    def from_blocks(cls, type: str, blocks: NDArray[np.uint8], inner: int) -> PackedMatrix:
        """blocks [rows, bytes of a row] as a GGUF file has them; rows may lie apart. No value changes."""
        if type not in BLOCK_TYPES:
            raise ConfigError(f"cannot pack {type!r} blocks; use one of {', '.join(BLOCK_TYPES)}")
        values, num_bytes, format = BLOCK_TYPES[type]
        rows = blocks.shape[0]
        if inner % values or blocks.shape[1] != inner // values * num_bytes:
            raise CheckpointError(
                f"{type} rows of {inner} values take whole blocks of {values}, {num_bytes} bytes each;"
                f" got {blocks.shape[1]} bytes a row"
            )
        if blocks.strides[1] != 1:
            blocks = np.ascontiguousarray(blocks)
        panels = _arena.allocate(packed_bytes(type, rows, inner))
        bound().pack_blocks(
            blocks.ctypes.data, blocks.strides[0], list(BLOCK_TYPES).index(type), panels.data_ptr(), rows, inner
        )
        return cls(panels, format, rows, inner)

    @classmethod
    def from_float(cls, weight: Tensor, storage: str = "float32") -> PackedMatrix:
        """weight [rows, inner] of a float type, kept as `storage`; int8 and int4 have a scale per 32 values."""
        if storage not in STORAGES:
            raise ConfigError(f"cannot store weights as {storage!r}; use one of {', '.join(STORAGES)}")
        if weight.dtype not in _SOURCES:
            weight = weight.float()
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        rows, inner = weight.shape
        panels = _arena.allocate(packed_bytes(storage, rows, inner))
        refused = ctypes.c_int64()
        bound().pack_floats(
            weight.data_ptr(),
            weight.stride(0) * weight.itemsize,
            _SOURCES.index(weight.dtype),
            FORMATS.index(STORAGES[storage]),
            panels.data_ptr(),
            rows,
            inner,
            ctypes.addressof(refused),
        )
        if refused.value >= 0:
            raise CheckpointError(
                f"row {refused.value} of a matrix has values that are not finite or too large for {storage};"
                " store it as float32"
            )
        return cls(panels, STORAGES[storage], rows, inner)

    @classmethod
    def from_codes(
        cls,
        format: str,
        codes: Tensor,
        scales: Tensor,
        minima: Tensor | None = None,
        order: Tensor | None = None,
    ) -> PackedMatrix:
        """codes [rows, inner] (of four bits, or bytes) that mean code * scale + minimum; code4 means code - 8.

        scales and minima [rows, groups of 32 columns], or of 16 for code8_f32 and formats that end in _16. `order`:
        which column of the matrix each column of the codes is.
        """
        rows, inner = codes.shape
        if format == "e4m3":
            scales = scales * 256  # of codes read as halves
        codes = codes.view(torch.int8) if format in FLOAT8 else codes
        num_bytes = packed_bytes(format, PANEL, inner)
        panels = _arena.allocate(packed_bytes(format, rows, inner))
        view = panels.numpy().reshape(-1, num_bytes)  # torch refuses to write to what inference mode made
        for first in range(0, rows, _ROWS):
            part = slice(first, first + _ROWS)
            packed = _code_panels(format, codes[part]).numpy()
            numbers = [scales[part]] if minima is None else [scales[part], minima[part]]
            grid = _scale_panels(numbers, torch.float16 if format in _HALF_SCALES else torch.float32).numpy()
            here = view[first // PANEL : first // PANEL + packed.shape[0]]
            here[:, : grid.shape[1]] = grid
            here[:, grid.shape[1] : num_bytes - packed.shape[1]] = 0
            here[:, num_bytes - packed.shape[1] :] = packed
        return cls(panels, format, rows, inner, None if order is None else order.to(torch.int32).contiguous())

    @property
    def num_bytes(self) -> int:
        return self.panels.numel()

    def dequantize(self) -> Tensor:
        """The weights as float32 [rows, inner]."""
        return self.embed(torch.arange(self.rows))

    def embed(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """ids [n] int64, all below `rows` -> those rows [n, inner] as float32."""
        ids = ids.contiguous()
        if out is None:
            out = empty(ids.shape[0], self.inner)
        bound().unpack_rows(
            self.panels.data_ptr(),
            FORMATS.index(self.format),
            self.inner,
            ids.data_ptr(),
            ids.shape[0],
            out.data_ptr(),
        )
        return out if self.order is None else out[:, self.order.argsort()]


def _by_panel(values: Tensor) -> Tensor:
    """[rows, n] -> [panels, 16, n], rows past the last being zero."""
    padded = torch.nn.functional.pad(values, (0, 0, 0, -values.shape[0] % PANEL))
    return padded.reshape(-1, PANEL, values.shape[1])


def _code_panels(format: str, codes: Tensor) -> Tensor:
    """codes [rows, inner] -> bytes [panels, ..] as panels.h has them."""
    panels = _by_panel(torch.nn.functional.pad(codes, (0, -codes.shape[1] % BLOCK)))
    if format.startswith("code8") or format in FLOAT8:
        lines: Tensor = panels.to(torch.int8).mT.contiguous()
        return lines.view(torch.uint8).flatten(1)
    # Eight elements of an output in a word, as four bytes.
    pairs = panels.to(torch.uint8).view(*panels.shape[:2], -1, 4, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).transpose(1, 2).reshape(panels.shape[0], -1)


def _scale_panels(numbers: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Scales, and perhaps minima, [rows, groups] -> bytes [panels, ..]: for each group those of 16 outputs."""
    grids = [_by_panel(number.to(dtype)).mT for number in numbers]  # [panels, groups, 16]
    grid: Tensor = torch.stack(grids, 2).contiguous()
    return grid.view(torch.uint8).flatten(1)


class Matmul:
    """x -> x @ concat(matrices).T + bias, for matrices of one inner size; each may have its own format.

    `activations`: "float32", or "int16" or "int8": x is rounded to integers with a scale for each 32, which is two or
    four times the arithmetic on processors with instructions for it. "auto": int16 on these. Float weights take
    float32 in any case.
    """

    def __init__(
        self, matrices: Sequence[PackedMatrix], bias: Tensor | None = None, activations: str = "auto"
    ) -> None:
        inner = matrices[0].inner
        assert all(matrix.inner == inner for matrix in matrices)
        self.inner = inner
        self.outputs = sum(matrix.rows for matrix in matrices)
        bias = None if bias is None else bias.float().contiguous()
        self._held = (tuple(matrices), bias)  # the plans have their addresses
        self._plans: list[tuple[ctypes.Array[ctypes.c_int64], int]] = []  # and the columns before each one's results
        column = 0
        for order, run in runs_in_order(matrices):
            segments = [(m.panels.data_ptr(), FORMATS.index(m.format), m.rows) for m in run]
            numbers = [inner, self.outputs, 0 if bias is None else bias.data_ptr() + 4 * column]
            numbers += [0 if order is None else order.data_ptr(), len(segments)]
            numbers += [number for segment in segments for number in segment]
            self._plans.append(((ctypes.c_int64 * len(numbers))(*numbers), column))
            column += sum(matrix.rows for matrix in run)
        if activations == "auto":
            activations = "int16" if multiplies_integers() else "float32"
        integers = all(matrix.format in _INTEGERS for matrix in matrices)
        self.activations = activations if integers else "float32"
        self._kernel = KERNEL_PREFIXES[self.activations] + "matmul"
        self._kernels = bound()
        self._calls = [(ctypes.addressof(plan), 4 * column) for plan, column in self._plans]

    @property
    def address(self) -> int:
        """Of the one plan that all matrices have, whose columns are in one order."""
        ((plan, _),) = self._calls
        return plan

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, inner] float32 -> [n, outputs]."""
        x = x.contiguous()
        rows = x.shape[0]
        out = empty(rows, self.outputs)
        for plan, offset in self._calls:
            getattr(self._kernels, self._kernel)(plan, x.data_ptr(), out.data_ptr() + offset, rows)
        return out


def runs_in_order(matrices: Sequence[PackedMatrix]) -> list[tuple[Tensor | None, list[PackedMatrix]]]:
    """Neighbours whose columns are in the same order, and that order."""
    runs: list[tuple[Tensor | None, list[PackedMatrix]]] = []
    for matrix in matrices:
        last = runs[-1][0] if runs else None
        same = last is matrix.order or (last is not None and matrix.order is not None and last.equal(matrix.order))
        if runs and same:
            runs[-1][1].append(matrix)
        else:
            runs.append((matrix.order, [matrix]))
    return runs
