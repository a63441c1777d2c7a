"""`quire worker --join ADDRESS`: run ranks of an engine that another host serves."""

from __future__ import annotations

import argparse
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from quire.config.env import child_environment, import_path, visible_devices
from quire.config.hosts import parse_address, read_secret
from quire.types.errors import ConfigError, EngineError
from quire.worker.door import Context, knock
from quire.worker.joining import LAUNCHER, REFUSED, JoinOrder, Lost

_POLL = 0.1  # seconds
_AGAIN_AFTER = 0.5  # seconds before a rank that ended joins again
_CONNECTED = {zmq.Event.CONNECTED, zmq.Event.ACCEPTED}
_REFUSED = {
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL,
    zmq.Event.HANDSHAKE_FAILED_AUTH,
    zmq.Event.DISCONNECTED,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--join", required=True, metavar="HOST:PORT", help="where the engine listens: its --hosts-address"
    )
    parser.add_argument(
        "--secret-file",
        metavar="FILE",
        help="file with the secret that engine and workers share. Default: the"
        " environment variable QUIRE_HOSTS_SECRET.",
    )
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="N", help="ranks to run here, such as one for each GPU. Default: 1."
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="limit of the wait for an engine. Default: 300.",
    )
    parser.add_argument("--once", action="store_true", help="leave when the engine ends, and wait for no other")


def run(args: argparse.Namespace) -> int:
    if args.ranks < 1:
        raise ConfigError(f"--ranks is {args.ranks} but must be at least 1")
    parse_address(args.join)
    secret = read_secret(args.secret_file)
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    return Ranks(args.join, secret, args.ranks, args.timeout, once=args.once).run()


class Ranks:
    """The ranks of this host: launched, and launched again when an engine has ended."""

    def __init__(self, address: str, secret: bytes, count: int, limit: float, *, once: bool) -> None:
        self._address, self._secret, self._count, self._limit, self._once = address, secret, count, limit, once
        self._processes: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}

    def run(self) -> int:
        for index in range(self._count):
            self._launch(index)
        try:
            while self._processes:
                time.sleep(_POLL)
                for index, (token, process) in list(self._processes.items()):
                    status = process.poll()
                    if status is not None:
                        del self._processes[index]
                        self._take_end(index, token, status)
        finally:
            for _, process in self._processes.values():
                process.terminate()
            for _, process in self._processes.values():
                process.wait()
        return 0

    def _launch(self, index: int) -> None:
        wait_until_open(self._address, self._secret, self._limit)  # first: a rank takes seconds to find out
        token = secrets.token_hex(8)
        order = JoinOrder(self._address, self._secret, token, self._count)
        self._processes[index] = token, launch(order, index)

    def _take_end(self, index: int, token: str, status: int) -> None:
        if status == REFUSED:
            raise EngineError(f"rank {index} of this host was refused; its last line says why")
        if status < 0:
            name = signal.Signals(-status).name
            hint = ": by hand, or because memory ran out" if name == "SIGKILL" else ""
            tell_lost(self._address, self._secret, token, f"was killed by {name}{hint}")
        if not self._once:
            time.sleep(_AGAIN_AFTER)
            self._launch(index)


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


def wait_until_open(address: str, secret: bytes, limit: float) -> None:
    """Until an engine that knows the secret answers at `address`.

    ConfigError if whoever listens there does not, EngineError if nobody has listened for `limit` seconds.
    """
    context: Context = zmq.Context()
    trial = knock(context, address, secret, b"")
    events = trial.get_monitor_socket(zmq.EVENT_ALL)
    deadline, is_connected = time.monotonic() + limit, False
    try:
        while (left := deadline - time.monotonic()) > 0:
            if not events.poll(int(left * 1000) + 1):
                break
            event = recv_monitor_message(events)["event"]
            is_connected = is_connected or event in _CONNECTED
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                return
            if event in _REFUSED and is_connected:
                raise ConfigError(
                    f"who listens at {address} does not accept the secret: it is not the engine's, or no engine"
                    " listens there; give both the same secret file"
                )
    finally:
        trial.disable_monitor()
        events.close(linger=0)
        trial.close(linger=0)
        context.term()
    raise EngineError(
        f"no engine has listened at {address} for {limit:g} s; check the address (--hosts-address of the engine) and"
        " firewalls between the hosts"
    )
