"""Door: where ranks on any host reach an engine: ZMQ, encrypted by CURVE with keys that are made of a secret."""

from __future__ import annotations

from hashlib import blake2b

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from quire.config.hosts import parse_address
from quire.types.errors import ConfigError

Context = zmq.Context[zmq.Socket[bytes]]


def derive(secret: bytes, purpose: bytes) -> bytes:
    return blake2b(secret, digest_size=32, person=purpose).digest()


def _key_pair(secret: bytes, side: bytes) -> tuple[bytes, bytes]:
    """(public, private)"""
    private = z85.encode(derive(secret, side))
    return zmq.curve_public(private), private


class _OnlyRanks:
    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


class Door:
    """The engine's side. Not for several threads at once."""

    def __init__(self, address: str, secret: bytes) -> None:
        if not zmq.has("curve"):
            raise ConfigError("this build of ZMQ has no CURVE encryption; install the wheel of pyzmq from PyPI")
        host, port = parse_address(address)
        self._context: Context = zmq.Context()
        self._guard = ThreadAuthenticator(self._context)
        self._guard.start()
        self._guard.configure_curve_callback("*", _OnlyRanks(_key_pair(secret, b"ranks")[0]))
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = _key_pair(secret, b"engine")
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        try:
            self._socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self.close()
            fix = (
                "another program listens there; choose another port" if error.errno == zmq.EADDRINUSE else str(error)
            )
            raise ConfigError(f"the engine cannot listen for workers at {address}: {fix}") from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")

    def send(self, identity: bytes, message: msgspec.Struct) -> None:
        self.send_parts(identity, msgspec.msgpack.encode(message))

    def send_parts(self, identity: bytes, *parts: bytes | memoryview) -> None:
        """Never blocks; what nobody there takes is dropped."""
        self._socket.send_multipart([identity, *parts], zmq.NOBLOCK)

    def receive(self, limit: float) -> list[tuple[bytes, bytes]]:
        """(identity, message) of all that has come; waits at most `limit` seconds for the first."""
        found: list[tuple[bytes, bytes]] = []
        if self._socket.poll(int(limit * 1000)):
            while self._socket.poll(0):
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
                if len(parts) == 2:
                    found.append((parts[0], parts[1]))
        return found

    def close(self, linger: float = 0.0) -> None:
        if not self._context.closed:
            self._socket.close(linger=int(linger * 1000))
            self._guard.stop()
            self._context.term()


def knock(context: Context, address: str, secret: bytes, identity: bytes) -> zmq.Socket[bytes]:
    """A rank's socket to the engine at `address`; connects when the engine is there."""
    host, port = parse_address(address)
    found = context.socket(zmq.DEALER)
    if identity:
        found.setsockopt(zmq.IDENTITY, identity)
    found.curve_serverkey = _key_pair(secret, b"engine")[0]
    found.curve_publickey, found.curve_secretkey = _key_pair(secret, b"ranks")
    found.setsockopt(zmq.RECONNECT_IVL, 100)
    found.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    found.setsockopt(zmq.SNDHWM, 0)
    found.setsockopt(zmq.RCVHWM, 0)
    found.setsockopt(zmq.LINGER, 1000)
    found.connect(f"tcp://{host}:{port}")
    return found
