"""Records the kernel calls of a step and replays them with one call: at one row the calls take less than Python does.

A recording is a list of calls with fixed addresses. Its intermediate results lie in one piece of memory, shared by
those that are never needed at the same time.
"""

from __future__ import annotations

import ctypes
import struct
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.kernels.cpu.library import load, parameters
from quire.kernels.cpu.memory import noted
from quire.platform.recording import NotRecordableError

_ALIGNMENT = 64
_FOREVER = 1 << 62


@dataclass
class _Buffer:
    """Memory that a step took, and the first and last of its calls that use it."""

    address: int
    num_bytes: int
    first: int = _FOREVER
    last: int = -1
    offset: int = 0


@dataclass(frozen=True)
class _Call:
    name: str
    arguments: tuple[Any, ...]


class KernelRecorder:
    def record(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """(what replays `step`, where each replay leaves its result). Runs `step` once.

        What `step` computes without kernels is not repeated: a recording must be tried on other inputs before it is
        believed. Tensors that `step` was given must outlive it.
        """
        library = load()
        assert library is not None, "native kernels were chosen without a library"
        calls: list[_Call] = []
        kernels = vars(library.kernels)
        originals = dict(kernels)

        def call(name: str, *arguments: Any) -> None:
            calls.append(_Call(name, arguments))
            originals[name](*arguments)

        kernels.update({name: partial(call, name) for name in originals})
        try:
            with noted() as tensors:
                result = step()
        finally:
            kernels.update(originals)
        slab, moved = _plan_memory(_buffers(tensors), calls, result)
        program = _assemble(calls, moved, {name: library.invoker(name) for name in originals})
        out = _on_slab(result, slab, moved)
        address, count = ctypes.addressof(program), len(calls)

        def replay(keep: Any = (program, slab)) -> None:
            library.replay(address, count)

        return replay, out


def _buffers(tensors: list[Tensor]) -> list[_Buffer]:
    found = [_Buffer(tensor.data_ptr(), tensor.untyped_storage().nbytes()) for tensor in tensors]
    return sorted((buffer for buffer in found if buffer.num_bytes), key=lambda buffer: buffer.address)


class _Moved:
    """Where addresses of a step are after its buffers have been moved together."""

    def __init__(self, buffers: list[_Buffer], base: int) -> None:
        self._buffers, self._base = buffers, base
        self._addresses = [buffer.address for buffer in buffers]

    def find(self, address: int) -> _Buffer | None:
        index = bisect_right(self._addresses, address) - 1
        if index < 0 or address >= self._buffers[index].address + self._buffers[index].num_bytes:
            return None
        return self._buffers[index]

    def __call__(self, address: int) -> int:
        buffer = self.find(address)
        return address if buffer is None else self._base + buffer.offset + address - buffer.address


def _plan_memory(buffers: list[_Buffer], calls: list[_Call], result: Tensor) -> tuple[Tensor, _Moved]:
    """Give each buffer a place that no other needs while it is in use."""
    finder = _Moved(buffers, 0)
    for index, call in enumerate(calls):
        for kind, argument in zip(parameters()[call.name], call.arguments, strict=True):
            buffer = finder.find(argument) if kind is ctypes.c_void_p and argument else None
            if buffer is not None:
                buffer.first, buffer.last = min(buffer.first, index), max(buffer.last, index)
    kept = finder.find(result.data_ptr())
    if kept is None:
        raise NotRecordableError("its result is not made by it")
    kept.last = _FOREVER
    placed: list[_Buffer] = []
    for buffer in sorted(buffers, key=lambda one: one.first):
        others = sorted(
            (one for one in placed if one.last >= buffer.first), key=lambda one: one.offset
        )  # those that begin later are not placed yet
        for other in others:
            if buffer.offset + buffer.num_bytes <= other.offset:
                break
            buffer.offset = max(buffer.offset, _aligned(other.offset + other.num_bytes))
        placed.append(buffer)
    size = max(one.offset + one.num_bytes for one in buffers)
    slab = torch.empty(size + _ALIGNMENT, dtype=torch.uint8)
    start = -slab.data_ptr() % _ALIGNMENT
    slab = slab[start : start + size]
    return slab, _Moved(buffers, slab.data_ptr())


def _assemble(calls: list[_Call], moved: _Moved, invokers: Mapping[str, int]) -> ctypes.Array[ctypes.c_int64]:
    """The calls as the library reads them: see quire_replay."""
    program: list[int] = []
    for call in calls:
        kinds = parameters()[call.name]
        program += [invokers[call.name], len(kinds)]
        for kind, argument in zip(kinds, call.arguments, strict=True):
            if kind is ctypes.c_float:
                program.append(struct.unpack("<q", struct.pack("<fi", argument, 0))[0])
            elif kind is ctypes.c_void_p:
                program.append(moved(argument) if argument else 0)
            else:
                program.append(argument)
    return (ctypes.c_int64 * len(program))(*program)


def _on_slab(result: Tensor, slab: Tensor, moved: _Moved) -> Tensor:
    start = moved(result.data_ptr()) - slab.data_ptr()
    part = slab[start : start + result.numel() * result.element_size()]
    return part.view(result.dtype).view(result.shape)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
