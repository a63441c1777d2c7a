"""The door: only who knows the secret comes in, and everyone else hears why not."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from quire.types.errors import ConfigError, EngineError
from quire.worker.door import Context, Door, knock, parse_address, read_secret, wait_until_open

SECRET = b"a secret of 16+ bytes"


@pytest.fixture
def context() -> Iterator[Context]:
    found: Context = zmq.Context()
    yield found
    found.destroy(linger=0)


def test_messages_pass_both_ways(context: Context) -> None:
    with closing(Door("127.0.0.1:0", SECRET)) as door:
        wait_until_open(context, door.address, SECRET, 10)
        with closing(knock(context, door.address, SECRET, b"abc/orders")) as rank:
            rank.send(b"hello")
            assert door.receive(10) == [(b"abc/orders", b"hello")]
            door.send_parts(b"nobody", b"lost")
            door.send_parts(b"abc/orders", b"header", b"payload")
            assert rank.poll(10_000)
            assert rank.recv_multipart() == [b"header", b"payload"]


def test_another_secret_is_refused(context: Context) -> None:
    with closing(Door("127.0.0.1:0", SECRET)) as door:
        with pytest.raises(ConfigError, match=f"who listens at {door.address} does not accept the secret"):
            wait_until_open(context, door.address, SECRET + b"!", 10)
        guess, plain = knock(context, door.address, SECRET + b"!", b"abc"), context.socket(zmq.DEALER)
        plain.setsockopt(zmq.LINGER, 0)
        plain.connect(f"tcp://{door.address}")
        with closing(guess), closing(plain):
            guess.send(b"hello")
            plain.send(b"hello")
            assert door.receive(0.5) == []


def test_something_else_that_listens_is_named(context: Context) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(EngineError, match=f"no engine has listened at {address} for 0.5 s"):
            wait_until_open(context, address, SECRET, 0.5)


def test_an_address_where_nobody_listens_is_named(context: Context) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(EngineError, match=f"no engine has listened at {address} for 0.3 s; check the address"):
        wait_until_open(context, address, SECRET, 0.3)


def test_an_occupied_port_is_refused() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"cannot listen for workers at {address}: another program listens"):
            Door(address, SECRET)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen for workers at 192\.0\.2\.1:0"):
        Door("192.0.2.1:0", SECRET)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("10.0.0.1", "is not HOST:PORT"),
        (":5900", "is not HOST:PORT"),
        ("10.0.0.1:x", "is not HOST:PORT"),
        ("10.0.0.1:65536", "is not HOST:PORT"),
        ("no-such-host.invalid:5900", "is not known"),
    ],
)
def test_addresses_that_are_none(address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_address(address)


def test_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_HOSTS_SECRET", raising=False)
    with pytest.raises(ConfigError, match="need a secret that they share"):
        read_secret(None)
    with pytest.raises(ConfigError, match="cannot be read from"):
        read_secret(str(tmp_path / "absent"))
    file = tmp_path / "secret"
    file.write_bytes(b"short\n")
    with pytest.raises(ConfigError, match="has 5 bytes but needs 16 or more"):
        read_secret(str(file))
    file.write_bytes(SECRET + b"\n")
    assert read_secret(str(file)) == SECRET
    monkeypatch.setenv("QUIRE_HOSTS_SECRET", "of the environment")
    assert read_secret(None) == b"of the environment"
