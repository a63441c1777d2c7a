"""The door: only who knows the secret comes in; and an address that cannot be listened at is refused."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest
import zmq

from quire.types.errors import ConfigError
from quire.worker.door import Context, Door, knock

SECRET = b"a secret of 16+ bytes"


@pytest.fixture
def context() -> Iterator[Context]:
    found: Context = zmq.Context()
    yield found
    found.destroy(linger=0)


def test_messages_pass_both_ways(context: Context) -> None:
    with (
        closing(Door("127.0.0.1:0", SECRET)) as door,
        closing(knock(context, door.address, SECRET, b"abc/orders")) as rank,
    ):
        rank.send(b"hello")
        assert door.receive(10) == [(b"abc/orders", b"hello")]
        door.send_parts(b"nobody", b"lost")
        door.send_parts(b"abc/orders", b"header", b"payload")
        assert rank.poll(10_000)
        assert rank.recv_multipart() == [b"header", b"payload"]


def test_another_secret_is_refused(context: Context) -> None:
    with closing(Door("127.0.0.1:0", SECRET)) as door:
        guess, plain = knock(context, door.address, SECRET + b"!", b"abc"), context.socket(zmq.DEALER)
        plain.setsockopt(zmq.LINGER, 0)
        plain.connect(f"tcp://{door.address}")
        with closing(guess), closing(plain):
            guess.send(b"hello")
            plain.send(b"hello")
            assert door.receive(0.5) == []


def test_an_occupied_port_is_refused() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"cannot listen for workers at {address}: another program listens"):
            Door(address, SECRET)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen for workers at 192\.0\.2\.1:0"):
        Door("192.0.2.1:0", SECRET)
