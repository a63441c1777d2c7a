"""A rank on any host: `python -m quire.worker.remote_rank`, launched by `quire worker` or by Ray.

It joins an engine by address, takes the place that it is given, and leaves when the engine does. A thread of its own
says heartbeats and hears those of the engine, whatever its steps do.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from quire.config.hosts import parse_address
from quire.loader.digest import model_digest
from quire.loader.hub import find_model
from quire.parallel.connect import connect
from quire.parallel.groups import ParallelGroup
from quire.parallel.pipeline import Pipeline
from quire.parallel.sockets import Mesh
from quire.platform.base import Platform
from quire.types.errors import QuireError
from quire.utils.log import get_logger
from quire.utils.version import build_version
from quire.worker import rank_messages as messages
from quire.worker.door import Context, derive, knock
from quire.worker.joining import CONTROL, ORDERS, REFUSED, REPORTS, JoinOrder
from quire.worker.rank import BEAT_EVERY, Rank, RankChannel, set_up_process

logger = get_logger("quire.worker.remote_rank")  # not __main__

_SILENT_AFTER = 50  # heartbeats of ours without one of the engine's, after which it is gone


class RefusedError(QuireError):
    """The engine does not want this rank."""


class RemoteChannel(RankChannel):
    def __init__(self, order: JoinOrder) -> None:
        self._order = order
        self._context: Context = zmq.Context()
        token = order.token.encode()
        self._orders, self._reports, self._control = (
            knock(self._context, order.address, order.secret, token + use) for use in (ORDERS, REPORTS, CONTROL)
        )
        self._send_lock = threading.Lock()  # adapters are read on a thread of their own
        self._placement: messages.Placement | None = None
        self.failure = self._mesh = Mesh(_address_towards(order.address), derive(order.secret, b"mesh"))

    def join(self) -> messages.Placement:
        """Ask for a place until there is one."""
        mine = messages.Join(build_version(), socket.gethostname(), os.getpid(), self._mesh.address)
        asked = 0.0
        while True:
            if time.monotonic() - asked >= 1.0:
                self._orders.send(msgspec.msgpack.encode(mine))
                asked = time.monotonic()
            if not self._orders.poll(200):
                continue
            match messages.decode_order(self._orders.recv()):
                case messages.Placement() as placement:
                    self._placement = placement
                    return placement
                case messages.Leave(reason):
                    raise RefusedError(reason)

    def keep_beating(self, parent: int) -> None:
        """Without its engine or its parent the process ends at once, even where a step waits for other ranks."""
        silent_for = 0
        while True:
            self._control.send(msgspec.msgpack.encode(messages.Beat(self._placement is not None)))
            silent_for += 1
            until = time.monotonic() + BEAT_EVERY
            while self._control.poll(max(0, int((until - time.monotonic()) * 1000))):
                silent_for = 0
                match messages.decode_order(self._control.recv()):
                    case messages.Ended(round) if round == self._mesh.round:
                        self._mesh.tell()
                    case messages.Leave(reason, is_refused):
                        if is_refused:
                            print(f"error: {reason}", file=sys.stderr, flush=True)
                        else:
                            logger.info("the engine ended this rank: %s", reason)
                        os._exit(REFUSED if is_refused else 0)
            if silent_for > _SILENT_AFTER or os.getppid() != parent:
                os._exit(1)

    def connect(self, platform: Platform) -> tuple[ParallelGroup, Pipeline]:
        assert self._placement is not None
        config, rank = self._placement.config, self._placement.rank
        parallel = config.parallel
        self._mesh.tensor_size, self._mesh.stages, self._mesh.context_size = parallel.sizes
        self.send(messages.Present(model_digest(find_model(config.model), config.model)))
        order = messages.decode_order(self._orders.recv())
        assert isinstance(order, messages.Connect)
        self._mesh.connect(rank, order.addresses, order.round)
        return connect(platform, self._mesh, rank, parallel, self._placement.meeting)

    def has_order(self) -> bool:
        return bool(self._orders.poll(0))

    def take_order(self, obey: Callable[[messages.ToRank, NDArray[np.uint8]], None]) -> None:
        header, *payload = self._orders.recv_multipart()
        match messages.decode_order(header):
            case messages.Connect(addresses, round):
                assert self._placement is not None
                self._mesh.connect(self._placement.rank, addresses, round)
            case message:
                obey(message, np.frombuffer(payload[0] if payload else b"", dtype=np.uint8))

    def send(self, message: messages.FromRank) -> None:
        with self._send_lock:
            self._reports.send(msgspec.msgpack.encode(message))

    def close(self) -> None:
        """What was said leaves first, within a second."""
        self._reports.close(linger=1000)
        self._orders.close(linger=0)
        time.sleep(2 * BEAT_EVERY)  # the engine may still answer, on the other thread


def _address_towards(address: str) -> str:
    """The address of this host by which it reaches another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(parse_address(address))
        found: str = probe.getsockname()[0]
        return found


def main() -> int:
    line = sys.stdin.buffer.readline()
    if not line:  # the parent is gone
        return 0
    parent = os.getppid()
    order = msgspec.json.decode(line, type=JoinOrder)
    set_up_process(0)
    try:
        channel = RemoteChannel(order)
        # A daemon: it ends the process, or ends with it.
        beating = threading.Thread(target=channel.keep_beating, args=(parent,), name="quire-heartbeat", daemon=True)
        beating.start()
        placement = channel.join()
    except QuireError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return REFUSED
    logger.info("rank %d of the engine at %s", placement.rank, order.address)
    status = Rank(placement.config, placement.rank, order.num_local, channel).run()
    channel.close()
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    status = main()
    sys.stdout.flush()
    os._exit(status)  # sockets of other threads need not be closed
