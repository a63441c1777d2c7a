"""What is read from sockets."""

from __future__ import annotations

import socket


def receive_exactly(source: socket.socket, count: int) -> bytes:
    """EOFError if the other side is gone before."""
    parts = bytearray()
    while len(parts) < count:
        try:
            data = source.recv(count - len(parts))
        except ConnectionResetError:
            data = b""
        if not data:
            raise EOFError("it closed the connection")
        parts += data
    return bytes(parts)
