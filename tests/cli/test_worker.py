"""`quire worker`: why an engine cannot be joined."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from quire.cli.main import main
from quire.cli.worker import wait_until_open
from quire.types.errors import ConfigError, EngineError
from quire.worker.door import Door

SECRET = b"a secret of 16+ bytes"


def test_an_engine_with_the_same_secret_is_open() -> None:
    with closing(Door("127.0.0.1:0", SECRET)) as door:
        wait_until_open(door.address, SECRET, 10)


def test_an_engine_with_another_secret_is_named() -> None:
    with (
        closing(Door("127.0.0.1:0", SECRET)) as door,
        pytest.raises(ConfigError, match=f"who listens at {door.address} does not accept the secret"),
    ):
        wait_until_open(door.address, SECRET + b"!", 10)


def test_something_else_that_listens_is_named() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(EngineError, match=f"no engine has listened at {address} for 0.5 s"):
            wait_until_open(address, SECRET, 0.5)


def test_an_address_where_nobody_listens_is_named() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(EngineError, match=f"no engine has listened at {address} for 0.3 s; check the address"):
        wait_until_open(address, SECRET, 0.3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--join", "here"], "is not HOST:PORT"),
        (["--join", "h:1", "--ranks", "0"], "--ranks is 0 but must be at least 1"),
    ],
)
def test_flags_that_cannot_be(
    flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_HOSTS_SECRET", SECRET.decode())
    assert main(["worker", *flags]) == 1
    assert message in capsys.readouterr().err
