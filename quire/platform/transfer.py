"""Small copies between host and device that never make the host wait for the device's queue."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_CODES = {torch.int32: "i", torch.int64: "q"}


def upload(values: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    """A list of integers as a device tensor, through pinned memory where the device has its own."""
    if device.type == "cpu" or not values:
        return torch.tensor(values, dtype=dtype, device=device)
    host = torch.empty(len(values), dtype=dtype, pin_memory=True)
    # An array is filled from a list several times faster than a tensor is.
    host.copy_(torch.frombuffer(array(_CODES[dtype], values), dtype=dtype))
    return host.to(device, non_blocking=True)


def upload_array(values: NDArray[np.int32], device: torch.device) -> Tensor:
    """The same for an array, which the caller leaves as it is."""
    host = torch.from_numpy(values)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def refresh(target: Tensor, host: Tensor) -> None:
    """Overwrite a device tensor by one of the host, which the caller may change at once. Does not wait."""
    if target.device.type == "cpu":
        target.copy_(host)
    else:
        target.copy_(host.pin_memory(), non_blocking=True)


class Staging:
    """Lines of int32 that the host writes and then brings to `target`, from memory that copies start from at once."""

    def __init__(self, target: Tensor) -> None:
        self._target = target
        self._is_target = target.device.type == "cpu"
        self.host = target if self._is_target else torch.empty(target.shape, dtype=target.dtype, pin_memory=True)

    def copy(self, count: int) -> None:
        """Bring the first `count` lines to the target. Does not wait, and may be captured."""
        if not self._is_target:
            self._target[:count].copy_(self.host[:count], non_blocking=True)


class PinnedRing:
    """A ring of pinned host buffers for lists of numbers that a device reads in place: a copy would take longer.

    A buffer is used again once the device is done with it.
    """

    _TURNS = 8  # more than there are steps in flight, so that nobody waits
    _MIN_LENGTH = 4096

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._turns: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    @contextmanager
    def list(self, values: Sequence[int]) -> Iterator[Tensor]:
        """The values, of 32 bits without a sign, as int32, for kernels that are called inside the context."""
        # An array is filled from a list several times faster than a tensor is, and fastest without signs.
        packed = torch.frombuffer(array("I", values), dtype=torch.int32)
        if self._device.type == "cpu":
            yield packed
            return
        buffer, event = self._turns.popleft() if len(self._turns) == self._TURNS else (None, torch.cuda.Event())
        if not event.query():
            event.synchronize()
        if buffer is None or buffer.shape[0] < len(values):
            buffer = torch.empty(max(self._MIN_LENGTH, 2 * len(values)), dtype=torch.int32, pin_memory=True)
        part = buffer[: len(values)]
        part.copy_(packed)
        yield part
        event.record()
        self._turns.append((buffer, event))


class Download:
    """A device tensor on its way to the host. `get` waits until it has arrived."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cpu":
            self._host = tensor
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def get(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._host


class StagedBytes:
    """A buffer that the host fills again and again, and its copy on the device; on a CPU they are the same memory."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._is_shared = device.type == "cpu"
        self.host = self.device if self._is_shared else torch.zeros(num_bytes, dtype=torch.uint8)

    def send(self) -> None:
        """Bring what the host wrote to the device; it may be written again at once. Does not wait."""
        if not self._is_shared:
            refresh(self.device, self.host)
