"""Which Host and Origin headers are this server's own.

A page on the web can make its own name point to this machine (DNS rebinding), and is then of the same origin as this
server for a browser; only the name that it asks for gives it away. Names that nobody can register cannot be used so.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection

_ANY = "*"
# Top-level domains that belong to no one: names below them are resolved by this machine or its network.
_LOCAL_DOMAINS = (".localhost", ".local", ".internal", ".lan", ".home.arpa")


def host_name(header: str) -> str:
    """The name or address of a Host header or of the part of an Origin after ://, without the port."""
    name = header.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].removesuffix(".")


def is_own_host(header: str, hosts: Collection[str]) -> bool:
    """Whether a client that asks for this name cannot be a page that made its name point here."""
    name = host_name(header)
    if _ANY in hosts or not name or ("." not in name and ":" not in name) or name.endswith(_LOCAL_DOMAINS):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in {host.lower() for host in hosts} or name == socket.gethostname().lower()
    return True


def is_own_origin(origin: str | None, host: str | None, origins: Collection[str]) -> bool:
    """Whether a request comes from no page, from a page of this server, or from one that it allows."""
    if origin is None or _ANY in origins or origin in origins:
        return True
    scheme, separator, rest = origin.partition("://")
    return bool(separator) and scheme in ("http", "https") and rest == host
