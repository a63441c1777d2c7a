"""The executor whose ranks are processes on this host.

Messages to ranks are written once, into a ring in shared memory; a rank that dies or stands still fails the engine.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.config.engine import EngineConfig
from quire.config.env import child_environment, import_path, visible_devices
from quire.parallel.shared_memory import CollectiveFailure, RankMemory, SharedMemory
from quire.types.errors import EngineDeadError
from quire.utils.phases import ReportPhase
from quire.worker.rank_messages import FrameReader, FromRank, RankOrder
from quire.worker.ranks import STILL_AFTER, TICK, Heart, RanksExecutor
from quire.worker.ring import NOTICE, RingWriter, ring_bytes

# -P: whatever lies in the current folder is not imported.
RANK_COMMAND = (sys.executable, "-P", "-m", "quire.worker.rank")
STOP_GRACE = 5.0  # seconds for ranks to leave


class RankProcess:
    """One rank, as its parent sees it."""

    def __init__(self, order: RankOrder, theirs: socket.socket, ours: socket.socket, device: str) -> None:
        self.rank = order.rank
        self._process = subprocess.Popen(
            RANK_COMMAND,
            stdin=subprocess.PIPE,
            env=child_environment(**import_path(), CUDA_VISIBLE_DEVICES=device),
            pass_fds=(order.socket_fd, order.ring_fd, order.collectives_fd),
        )
        theirs.close()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(msgspec.json.encode(order) + b"\n")
        self.socket, self.frames = ours, FrameReader()
        self.heart = Heart()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_gone(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> str:
        """How it ended, which it has or is about to."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return f"rank {self.rank} (process {self.pid}) has closed its connection"
        if code == -signal.SIGKILL:
            return f"rank {self.rank} (process {self.pid}) was killed by SIGKILL: by hand, or because memory ran out"
        how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
        return f"rank {self.rank} (process {self.pid}) {how}"

    def send(self, data: bytes) -> None:
        with suppress(OSError):  # whoever waits for an answer will hear that it is gone
            self.socket.sendall(data)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    def leave(self, limit: float) -> None:
        """Blocks until it is gone, at most about `limit` seconds of its own accord."""
        self.socket.close()
        try:
            self._process.wait(limit)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()


class MultiProcExecutor(RanksExecutor):
    def __init__(self, config: EngineConfig, report: ReportPhase) -> None:
        super().__init__(config, report)
        parallel, size = config.parallel, self.num_ranks
        self._ring_memory = SharedMemory(ring_bytes(size))
        self._memory = RankMemory(*parallel.sizes)
        self._ring = RingWriter(self._ring_memory, size)
        self._failed_ranks = CollectiveFailure(self._memory.parts())
        self._meeting = tempfile.TemporaryDirectory(prefix="quire-ranks-")
        self._selector = selectors.DefaultSelector()
        self.ranks = [self._launch(config, rank, size) for rank in range(size)]
        self._start()

    def _launch(self, config: EngineConfig, rank: int, size: int) -> RankProcess:
        ours, theirs = socket.socketpair()
        order = RankOrder(
            config=config,
            rank=rank,
            size=size,
            socket_fd=theirs.fileno(),
            ring_fd=self._ring_memory.fd,
            collectives_fd=self._memory.fd,
            meeting=os.path.join(self._meeting.name, "store"),
        )
        devices = visible_devices()
        process = RankProcess(order, theirs, ours, devices[rank] if rank < len(devices) else str(rank))
        ours.setblocking(True)
        self._selector.register(ours, selectors.EVENT_READ, process)
        return process

    def _post(self, header: bytes, payload: NDArray[np.uint8]) -> None:
        notice = self._ring.write(header, payload, self._check)
        if notice is None:
            notice = NOTICE.pack(-1, len(header), len(payload)) + header + payload.tobytes()
        for process in self.ranks:
            process.send(notice)

    def _receive(self, limit: float) -> Iterator[tuple[int, FromRank]]:
        for key, _ in self._selector.select(limit):
            process: RankProcess = key.data
            try:
                for message in process.frames.take(process.socket):
                    yield process.rank, message
            except EOFError:
                raise EngineDeadError(process.end()) from None

    def _look(self) -> None:
        for process, words in zip(self.ranks, self._ring.ranks, strict=True):
            if process.heart.look(words.beats):
                still = f"rank {process.rank} (process {process.pid}) has stood still for {STILL_AFTER * TICK:g} s"
                self._fail(EngineDeadError(f"{still}; the engine cannot go on without it"))
                return
            if process.is_gone and process.heart.still_for > 5:  # its last words have been read
                self._fail(EngineDeadError(process.end()))
                return

    def _end_ranks(self, reason: str) -> None:
        for process in self.ranks:
            process.kill()

    def _start_over(self) -> None:
        self._failed_ranks.forget()

    def _close(self) -> None:
        deadline = time.monotonic() + STOP_GRACE
        self._selector.close()
        for process in self.ranks:
            process.socket.close()
        for process in self.ranks:
            process.leave(max(0.0, deadline - time.monotonic()))
        self._ring_memory.close()
        self._memory.close()
        self._meeting.cleanup()
