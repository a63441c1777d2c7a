"""Transport: typed messages between two processes of one machine, over ZMQ. Knows no engine and no request.

Each side listens on a socket of its own and sends into the other's. Every message begins with a secret that only the
two sides know, so what a stranger on the machine sends is dropped unread, and nobody else can take messages away.
"""

from __future__ import annotations

import hmac
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import zmq

from quire.utils.log import get_logger

logger = get_logger(__name__)

M = TypeVar("M")

TOKEN_BYTES = 16
# A longer path does not fit a socket's address (108 bytes on Linux, 104 on macOS).
_IPC_PATH_MAX = 100
_LOOPBACK = "tcp://127.0.0.1:*"


class Meeting(msgspec.Struct, frozen=True):
    """Where two processes meet. `folder` is private to the user and holds the sockets; None on TCP."""

    client: str
    engine: str
    token: bytes
    folder: str | None

    def remove(self) -> None:
        """Remove the folder. May be called twice, and by either side."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def make_meeting(*, ipc: bool | None = None) -> Meeting:
    """A new place that no one else knows: a private folder, or where that is impossible a port of the loopback."""
    token = secrets.token_bytes(TOKEN_BYTES)
    if ipc is None:
        ipc = zmq.has("ipc")
    if ipc:
        folder = tempfile.mkdtemp(prefix="quire-")  # readable by its owner only
        if len(folder) + len("/engine") <= _IPC_PATH_MAX:
            return Meeting(f"ipc://{folder}/client", f"ipc://{folder}/engine", token, folder)
        Path(folder).rmdir()
    return Meeting(_LOOPBACK, _LOOPBACK, token, None)


class Sender:
    """Sends messages to one receiver. Never blocks: what the other side has not taken yet waits in memory."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, token: bytes) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.connect(endpoint)
        self._token = token
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: msgspec.Struct) -> None:
        self._socket.send(self._token + self._encoder.encode(message), zmq.NOBLOCK)

    def close(self, linger: float = 0.0) -> None:
        """Close; the context then waits up to `linger` seconds for what was sent to leave."""
        self._socket.close(linger=int(linger * 1000))


class UndecodableError(Exception):
    """A message of the right sender that is none of the expected types. `content` is what it holds."""

    def __init__(self, reason: str, content: object) -> None:
        super().__init__(reason)
        self.content = content


class Receiver(Generic[M]):
    """Listens for messages of one type (a union of structs)."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        token: bytes,
        decoder: msgspec.msgpack.Decoder[M],
    ) -> None:
        self.socket = context.socket(zmq.PULL)
        self.socket.bind(endpoint)
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._token = token
        self._decoder = decoder

    def fileno(self) -> int:
        """Becomes readable when messages arrive: a hint, given once; `receive` until None after each."""
        return self.socket.fileno()

    def receive(self) -> M | None:
        """The next message, or None if there is none now."""
        while True:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if not hmac.compare_digest(frame[:TOKEN_BYTES], self._token):
                logger.warning("dropped a message of %d bytes from a stranger on %s", len(frame), self.endpoint)
                continue
            content = memoryview(frame)[TOKEN_BYTES:]
            try:
                return self._decoder.decode(content)
            except msgspec.ValidationError as error:
                raise UndecodableError(str(error), msgspec.msgpack.decode(content)) from error

    def close(self) -> None:
        self.socket.close(linger=0)
