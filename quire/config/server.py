"""Checks of the server's settings that need neither a model nor a socket."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from quire.config import env
from quire.config.groups import ServerConfig
from quire.types.errors import ConfigError

_LABEL = re.compile(r"[A-Za-z0-9-]+(_[A-Za-z0-9-]+)*")


@dataclass(frozen=True, slots=True)
class ToolServerAddress:
    """Where a tool server is: an address, or a command that talks over its standard input and output."""

    label: str
    url: str | None = None
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AdminAddress:
    """Where the admin surface is: the path of a Unix socket, or a host and a port."""

    path: str | None = None
    host: str = ""
    port: int = 0


def admin_address_of(text: str) -> AdminAddress:
    """Read unix:PATH or HOST:PORT."""
    kind, _, path = text.partition(":")
    if kind == "unix" and path:
        return AdminAddress(path)
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"admin is {text!r} but must be unix:PATH or HOST:PORT")
    return AdminAddress(None, host.strip("[]"), int(port))


def admin_address(config: ServerConfig) -> AdminAddress | None:
    """Where the admin surface listens, if anywhere. A port needs a key: anybody on the machine may connect to it."""
    if config.admin is None:
        return None
    address = admin_address_of(config.admin)
    if address.path is None and not collect_admin_keys(config):
        raise ConfigError(
            f"admin is {config.admin!r}, a port, and there is no key; give --admin-key-file or a unix:PATH"
        )
    return address


def collect_admin_keys(config: ServerConfig) -> tuple[str, ...]:
    return admin_keys(config.admin_key_file)


def admin_keys(path: str | None) -> tuple[str, ...]:
    """The keys of the file and of the environment."""
    return tuple(
        dict.fromkeys([*env.admin_keys(), *(_read_keys(path, "admin_key_file") if path is not None else ())])
    )


def check_server(config: ServerConfig) -> None:
    """Refuse values that cannot work."""
    if not 0 <= config.port <= 65535:
        raise ConfigError(f"port is {config.port} but must be between 0 and 65535")
    least = {
        "api_server_count": (config.api_server_count, 1),
        "max_queue": (config.max_queue, 0),
        "max_body_bytes": (config.max_body_bytes, 1),
        "max_n": (config.max_n, 1),
        "max_logprobs": (config.max_logprobs, -1),
        "max_restarts": (config.max_restarts, 0),
        "header_timeout": (config.header_timeout, 0),
        "drain_timeout": (config.drain_timeout, 0),
        "stats_interval": (config.stats_interval, 0),
        "journal_ttl": (config.journal_ttl, 0),
        "max_stored_responses": (config.max_stored_responses, 0),
        "max_stored_bytes": (config.max_stored_bytes, 0),
        "tool_call_timeout": (config.tool_call_timeout, 0),
        "max_tool_turns": (config.max_tool_turns, 1),
        "max_tool_result_bytes": (config.max_tool_result_bytes, 1),
    }
    for name, (value, minimum) in least.items():
        if not value >= minimum:
            raise ConfigError(f"{name} is {value} but must be at least {minimum}")
    if not config.stall_timeout > 0:
        raise ConfigError(f"stall_timeout is {config.stall_timeout} but must be above 0")
    if config.ssl_keyfile is not None and config.ssl_certfile is None:
        raise ConfigError("ssl_keyfile is given without ssl_certfile; give the certificate too")
    if config.root_path and not config.root_path.startswith("/"):
        raise ConfigError(f"root_path is {config.root_path!r} but must begin with a slash")
    for name in ("served_model_name", "api_key", "allowed_origins", "allowed_hosts"):
        if not all(getattr(config, name)):
            raise ConfigError(f"{name} is empty; give a text, or leave the flag out")
    tool_server_addresses(config)
    admin_address(config)


def tool_server_addresses(config: ServerConfig) -> tuple[ToolServerAddress, ...]:
    """The servers of the --tool-server flags, whose labels differ."""
    addresses = tuple(_tool_server_address(text) for text in config.tool_server)
    labels = [address.label for address in addresses]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"tool_server has the label {label!r} twice; give each server its own")
    return addresses


def _tool_server_address(text: str) -> ToolServerAddress:
    label, equals, target = text.partition("=")
    if not equals or _LABEL.fullmatch(label) is None:
        raise ConfigError(
            f"tool_server is {text!r} but must be LABEL=http://HOST:PORT/mcp or LABEL=stdio:COMMAND ARGS, with a"
            " label of letters, digits, - and single _"
        )
    if target.startswith(("http://", "https://")):
        return ToolServerAddress(label, url=target)
    kind, _, command = target.partition(":")
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise ConfigError(f"tool_server {label!r} has a command that cannot be read: {error}") from error
    if kind != "stdio" or not words:
        raise ConfigError(f"tool_server {label!r} is at {target!r} but must be at http://, https:// or stdio:COMMAND")
    return ToolServerAddress(label, command=words)


def collect_api_keys(config: ServerConfig) -> tuple[str, ...]:
    """The keys of the flags, of the file and of the environment; none means that no key is asked for."""
    keys = [*config.api_key, *env.api_keys()]
    if config.api_key_file is not None:
        keys += _read_keys(config.api_key_file, "api_key_file")
    return tuple(dict.fromkeys(keys))


@cache  # a pipe, such as the shell's <(COMMAND), can be read once; and keys stay what they were at the start
def _read_keys(path: str, setting: str) -> list[str]:
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting} {path!r} cannot be read: {error}") from error
    found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not found:
        # An empty file must not mean that everybody may come in.
        raise ConfigError(f"{setting} {path!r} holds no key; write one per line")
    return found
