"""Recorded work: kernels that are called once, kept as a list or a graph, and replayed with one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class NotRecordableError(Exception):
    """A step does something that cannot be recorded; the message names it."""


SizedStep = Callable[..., Sequence[Tensor]]
"""A step at given sizes, such as numbers of tokens and rows: its results, each with a line per token or row."""


class SizedRecording(Protocol):
    """A step that can be repeated at any sizes up to its limits."""

    results: list[Tensor]
    """Where each replay leaves its results, with as many lines as there can be; the next replay overwrites them."""

    def __call__(self, *sizes: int) -> None:
        """Do it again at these sizes."""


class SizedRecorder(Protocol):
    """Keeps the work of a step, to do it again without the host's part in it."""

    def record(self, step: SizedStep, trials: Sequence[tuple[int, ...]], limits: tuple[int, ...]) -> SizedRecording:
        """Run `step` at each of the trials' sizes and keep it for all sizes up to `limits`, or NotRecordableError.

        Trials should leave nothing to guess: more of them than sizes, in no line with each other. What `step` does
        without kernels is not seen, so a recording must be tried on other inputs before it is believed.
        """


class GraphPool(Protocol):
    """Captures work as graphs that share memory: one may overwrite what another has left, except for results."""

    def capture(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """(what replays `work`, where each replay leaves its result). Runs `work` once before, to warm up."""


class CudaGraphPool:
    def __init__(self, room: int) -> None:
        """Graphs are cut from `room` bytes, which are taken at once.

        They are captured in any order. If they were not given memory before, each that is larger than all before it
        would take its own, since what those leave is too small for it.
        """
        self._pool = torch.cuda.graph_pool_handle()
        # One for all captures: the library keeps a workspace of 32 MiB for every stream that it has seen.
        self._warm_up = torch.cuda.Stream()
        self._first = torch.cuda.CUDAGraph()  # a pool lives as long as any graph of it
        with torch.cuda.graph(self._first, pool=self._pool):
            torch.empty(max(1, room), dtype=torch.uint8, device="cuda")[:1].zero_()

    def capture(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        self._warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._warm_up):
            work()
        torch.cuda.current_stream().wait_stream(self._warm_up)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = work()
        return graph.replay, out
