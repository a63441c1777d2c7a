"""Recorded work: kernels that are called once, kept as a list or a graph, and replayed with one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class NotRecordableError(Exception):
    """A step does something that cannot be recorded; the message names it."""


class ForwardRecorder(Protocol):
    """Keeps the work of a forward pass, to do it again without the host's part in it."""

    def record(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """(what replays `step`, where each replay leaves its result). Runs `step` once; may raise NotRecordableError.

        A recording must be tried on other inputs before it is believed: what it cannot see it does not repeat.
        """


class Recorder:
    """Its recordings share memory, so the result of one is valid until the next is replayed."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """(what replays `step`, where each replay leaves its result). Runs `step` once before, to warm up."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = step()
        return graph.replay, out
