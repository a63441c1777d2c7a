"""What an engine and workers on other hosts agree on: an address and a secret."""

from __future__ import annotations

import socket
from pathlib import Path

from quire.config.env import hosts_secret
from quire.types.errors import ConfigError

SHORTEST_SECRET = 16


def read_secret(path: str | None) -> bytes:
    """What engine and ranks share: the content of a file, else of QUIRE_HOSTS_SECRET."""
    if path is not None:
        try:
            secret = Path(path).expanduser().read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"the secret of hosts cannot be read from {path}: {error.strerror}") from error
        where = path
    else:
        secret, where = hosts_secret().encode(), "QUIRE_HOSTS_SECRET"
    if not secret:
        raise ConfigError(
            "engine and workers on several hosts need a secret that they share; write one to a file, such as with"
            " `openssl rand -hex 32`, and give it to both: --hosts-secret-file of the engine, --secret-file of"
            " `quire worker`; or set QUIRE_HOSTS_SECRET"
        )
    if len(secret) < SHORTEST_SECRET:
        raise ConfigError(f"the secret in {where} has {len(secret)} bytes but needs {SHORTEST_SECRET} or more")
    return secret


def nth_address(address: str, index: int) -> str:
    """Where workers join replica number `index`: ports follow each other."""
    if index == 0:
        return address
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) <= 65535 - index:
        raise ConfigError(
            f"hosts_address is {address!r}, but workers of {index + 1} replicas join at as many ports, from this one"
            f" on; give one of 1 to {65535 - index}"
        )
    return f"{host}:{int(port) + index}"


def parse_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"the address {address!r} is not HOST:PORT, such as 10.0.0.1:5900")
    try:
        return socket.gethostbyname(host), int(port)
    except OSError as error:
        raise ConfigError(f"the host of {address!r} is not known: {error.strerror}") from error
