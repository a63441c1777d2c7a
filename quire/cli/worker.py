"""`quire worker --join ADDRESS`: run ranks of an engine that another host serves."""

from __future__ import annotations

import argparse
import secrets
import signal
import subprocess
import time

from quire.types.errors import ConfigError, EngineError

_POLL = 0.1  # seconds
_AGAIN_AFTER = 0.5  # seconds before a rank that ended joins again


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
    from quire.worker.door import read_secret

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
        from quire.worker.joining import JoinOrder, check_open, launch

        check_open(self._address, self._secret, self._limit)  # first: a rank takes seconds to find out
        token = secrets.token_hex(8)
        order = JoinOrder(self._address, self._secret, token, self._count, self._limit)
        self._processes[index] = token, launch(order, index)

    def _take_end(self, index: int, token: str, status: int) -> None:
        from quire.worker.joining import REFUSED, tell_lost

        if status == REFUSED:
            raise EngineError(f"rank {index} of this host was refused; its last line says why")
        if status < 0:
            name = signal.Signals(-status).name
            hint = ": by hand, or because memory ran out" if name == "SIGKILL" else ""
            tell_lost(self._address, self._secret, token, f"was killed by {name}{hint}")
        if not self._once:
            time.sleep(_AGAIN_AFTER)
            self._launch(index)
