"""Addresses and secrets of hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config.hosts import parse_address, read_secret
from quire.types.errors import ConfigError

SECRET = b"a secret of 16+ bytes"


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
