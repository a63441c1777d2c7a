"""Records the kernel calls of a step and replays them with one call, at any number of tokens and rows.

A step is traced at a few sizes. Its calls must be the same each time: with the same addresses, or places in its own
buffers, and with numbers that never change or are one of the sizes. Its buffers, at the largest sizes, then share one
piece of memory, each at a place that no other needs at the same time; a replay writes the sizes into the calls.
"""

from __future__ import annotations

import ctypes
import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.kernels.cpu.library import Library, load, parameters
from quire.kernels.cpu.tracing import traced
from quire.platform.recording import NotRecordableError, SizedStep

_ALIGNMENT = 64
_FOREVER = 1 << 62


class _Place(NamedTuple):
    """Memory that the step takes: which of its buffers, and how far into it."""

    buffer: int
    offset: int


class _Size(NamedTuple):
    """A number that is one of the sizes."""

    which: int


_Argument = int | _Place | _Size
_Call = tuple[str, tuple[_Argument, ...]]


@dataclass(frozen=True)
class _Trace:
    """One run of a step."""

    sizes: tuple[int, ...]
    calls: list[_Call]
    buffer_bytes: list[int]
    results: list[tuple[_Place, torch.Size, torch.dtype]]


@dataclass
class _Buffer:
    """Memory at the largest sizes, and the first and last of the calls that use it."""

    num_bytes: int
    first: int = _FOREVER
    last: int = -1
    offset: int = 0


class KernelRecorder:
    def record(self, step: SizedStep, trials: Sequence[tuple[int, ...]], limits: tuple[int, ...]) -> KernelRecording:
        """Run `step`, but not its kernels, at each of the trials' sizes and keep its calls, for sizes up to `limits`.

        See SizedRecorder. Tensors that `step` was given must outlive the recording.
        """
        library = load()
        assert library is not None, "native kernels were chosen without a library"
        traces = [_trace(step, sizes) for sizes in trials]
        return KernelRecording(library, _merge_calls(traces), _merge_buffers(traces, limits), traces[0], limits)


class KernelRecording:
    """Calls as the library reads them, and the memory they work in."""

    def __init__(
        self, library: Library, calls: list[_Call], buffers: list[_Buffer], trace: _Trace, limits: tuple[int, ...]
    ) -> None:
        self._limits = limits
        self._sizes: tuple[int, ...] = ()
        self._num_calls = len(calls)
        self._replay = library.replay
        self._slab = _lay_out(buffers, calls, {place.buffer for place, _, _ in trace.results})
        base = self._slab.data_ptr()
        program: list[int] = []
        of_size: list[list[int]] = [[] for _ in limits]
        for name, arguments in calls:
            program += [library.invoker(name), len(arguments)]
            for argument in arguments:
                if isinstance(argument, _Size):
                    of_size[argument.which].append(len(program))
                    argument = 0
                elif isinstance(argument, _Place):
                    argument = base + buffers[argument.buffer].offset + argument.offset
                program.append(argument)
        self._program = np.array(program, dtype=np.int64)
        self._address = self._program.ctypes.data
        self._of_size = [np.array(places, dtype=np.int64) for places in of_size]
        self.results = [
            self._tensor(buffers[place.buffer], place.offset, shape, dtype) for place, shape, dtype in trace.results
        ]

    def __call__(self, *sizes: int) -> None:
        if sizes != self._sizes:
            assert len(sizes) == len(self._limits), "a size for each limit"
            for size, limit, places in zip(sizes, self._limits, self._of_size, strict=True):
                assert size <= limit, f"recorded for at most {limit}, not for {size}"
                self._program[places] = size
            self._sizes = sizes
        self._replay(self._address, self._num_calls)

    @property
    def num_bytes(self) -> int:
        return self._slab.numel()

    def _tensor(self, buffer: _Buffer, offset: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A result at the largest sizes: as many lines as its buffer has room for."""
        line = dtype.itemsize * shape[1:].numel()
        rows = (buffer.num_bytes - offset) // line
        start = buffer.offset + offset
        return self._slab[start : start + rows * line].view(dtype).view(rows, *shape[1:])


def _trace(step: SizedStep, sizes: tuple[int, ...]) -> _Trace:
    """The calls that `step` makes. They are not carried out, which would take longer than all else."""
    with traced() as trace:
        results = step(*sizes)
    places = _Places(trace.buffers)
    return _Trace(
        sizes,
        [(name, tuple(map(partial(_argument, places), parameters()[name], values))) for name, values in trace.calls],
        [tensor.untyped_storage().nbytes() for tensor in trace.buffers],
        [(places.of_result(result), result.shape, result.dtype) for result in results],
    )


class _Places:
    """Finds the buffer that an address lies in."""

    def __init__(self, buffers: list[Tensor]) -> None:
        found = [
            (tensor.data_ptr(), tensor.untyped_storage().nbytes(), index) for index, tensor in enumerate(buffers)
        ]
        self._buffers = sorted(buffer for buffer in found if buffer[1])
        self._starts = [start for start, _, _ in self._buffers]

    def find(self, address: int) -> _Place | None:
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        start, size, index = self._buffers[at]
        return _Place(index, address - start) if address < start + size else None

    def of_result(self, result: Tensor) -> _Place:
        place = self.find(result.data_ptr())
        if place is None or not result.is_contiguous():
            raise NotRecordableError("its result is not made by it")
        return place


def _argument(places: _Places, kind: type, value: Any) -> _Argument:
    if kind is ctypes.c_float:
        bits: int = struct.unpack("<q", struct.pack("<fi", value, 0))[0]
        return bits
    if kind is ctypes.c_void_p:
        return places.find(value) or value if value else 0
    return int(value)


def _merge_calls(traces: list[_Trace]) -> list[_Call]:
    """The calls of all traces as one list."""
    names = [[name for name, _ in trace.calls] for trace in traces]
    if any(other != names[0] for other in names):
        raise NotRecordableError("calls other kernels for another number of tokens")
    sizes = [trace.sizes for trace in traces]
    return [
        (
            calls[0][0],
            tuple(_merge(calls[0][0], values, sizes) for values in zip(*(call[1] for call in calls), strict=True)),
        )
        for calls in zip(*(trace.calls for trace in traces), strict=True)
    ]


def _merge(name: str, values: tuple[_Argument, ...], sizes: list[tuple[int, ...]]) -> _Argument:
    if all(value == values[0] for value in values):
        return values[0]
    for index in range(len(sizes[0])):
        if all(value == size[index] for value, size in zip(values, sizes, strict=True)):
            return _Size(index)
    raise NotRecordableError(f"gives {name} what depends on the step in no simple way")


def _merge_buffers(traces: list[_Trace], limits: tuple[int, ...]) -> list[_Buffer]:
    """Each buffer at the largest sizes: its size is fixed, or grows by a number of bytes for each token or row."""
    sizes = [trace.sizes for trace in traces]
    return [
        _Buffer(_largest(num_bytes, sizes, limits))
        for num_bytes in zip(*(trace.buffer_bytes for trace in traces), strict=True)
    ]


def _largest(num_bytes: tuple[int, ...], sizes: list[tuple[int, ...]], limits: tuple[int, ...]) -> int:
    if all(value == num_bytes[0] for value in num_bytes):
        return num_bytes[0]
    for index, limit in enumerate(limits):
        each = num_bytes[0] // sizes[0][index]
        if all(value == each * size[index] for value, size in zip(num_bytes, sizes, strict=True)):
            return each * limit
    raise NotRecordableError("takes memory that depends on the step in no simple way")


def _lay_out(buffers: list[_Buffer], calls: list[_Call], results: set[int]) -> Tensor:
    """Give each buffer a place that no other needs while it is in use, and take memory for all."""
    for index, (_, arguments) in enumerate(calls):
        for argument in arguments:
            if isinstance(argument, _Place):
                buffer = buffers[argument.buffer]
                buffer.first, buffer.last = min(buffer.first, index), max(buffer.last, index)
    for index in results:
        buffers[index].last = _FOREVER
    placed: list[_Buffer] = []
    for buffer in sorted((one for one in buffers if one.last >= 0), key=lambda one: one.first):
        # Of those that are placed by now, the others begin earlier.
        for other in sorted((one for one in placed if one.last >= buffer.first), key=lambda one: one.offset):
            if buffer.offset + buffer.num_bytes <= other.offset:
                break
            buffer.offset = max(buffer.offset, _aligned(other.offset + other.num_bytes))
        placed.append(buffer)
    size = max(one.offset + one.num_bytes for one in placed)
    slab = torch.empty(size + _ALIGNMENT, dtype=torch.uint8)
    start = -slab.data_ptr() % _ALIGNMENT
    return slab[start : start + size]


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
