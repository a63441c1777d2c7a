"""How a rank on any host is launched, and what it is told. Imports no torch: `quire worker` itself runs no steps."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

import msgspec
import zmq

from quire.config.env import child_environment, import_path, visible_devices
from quire.worker.door import Context, knock, wait_until_open

REFUSED = 3  # exit status: joining again would not help, and the cause was printed
ORDERS, REPORTS, CONTROL, LAUNCHER = b"/orders", b"/reports", b"/control", b"/launcher"


class Lost(msgspec.Struct, tag=True, frozen=True):
    """Whoever launched a rank tells the engine how it ended."""

    reason: str


class JoinOrder(msgspec.Struct, frozen=True):
    """What a remote rank reads from stdin."""

    address: str
    secret: bytes
    token: str  # names it to the engine
    num_local: int  # ranks of this host
    limit: float  # seconds to wait for the engine


def check_open(address: str, secret: bytes, limit: float) -> None:
    """See `wait_until_open`."""
    context: Context = zmq.Context()
    try:
        wait_until_open(context, address, secret, limit)
    finally:
        context.term()


def launch(order: JoinOrder, index: int) -> subprocess.Popen[bytes]:
    """Start a rank, the `index`-th of this host, which has the GPU of that number."""
    devices = visible_devices()
    environment = child_environment(
        **import_path(), CUDA_VISIBLE_DEVICES=devices[index] if index < len(devices) else str(index)
    )
    # -P: whatever lies in the current folder is not imported.
    command = (sys.executable, "-P", "-m", "quire.worker.remote_rank")
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(msgspec.json.encode(order) + b"\n")
    return process


def tell_lost(address: str, secret: bytes, token: str, reason: str) -> None:
    """Tell the engine how a rank ended that could not say it itself."""
    context: Context = zmq.Context()
    speaking = knock(context, address, secret, token.encode() + LAUNCHER)
    speaking.send(msgspec.msgpack.encode(Lost(reason)))
    speaking.close(linger=1000)
    context.term()
