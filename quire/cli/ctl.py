"""`quire ctl VERB`: have a running server do something, over its admin surface."""

from __future__ import annotations

import argparse
import http.client
import json
import socket
from typing import Any
from urllib.parse import urlencode

from quire.config.server import admin_address_of, admin_keys
from quire.types.errors import ConfigError, EngineError

DEFAULT_LIMIT = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("verb", metavar="VERB", nargs="?", help="such as restart-engine; absent: the list of verbs")
    add("argument", metavar="JSON", nargs="?", help="the verb's argument, if it takes one")
    add("--admin", required=True, metavar="ADDRESS", help="as `quire serve --admin` has it: unix:PATH or HOST:PORT")
    add("--model", metavar="NAME", help="which model of a server of several (--models)")
    add("--admin-key-file", metavar="FILE", help="file with the admin key; also QUIRE_ADMIN_KEY")
    add("--limit", type=float, default=DEFAULT_LIMIT, metavar="SECONDS", help="to wait for; default %(default)g")


def run(args: argparse.Namespace) -> int:
    path = "/admin" if args.verb is None else f"/admin/{args.verb}"
    if args.model is not None:
        path += f"?{urlencode({'model': args.model})}"
    keys = admin_keys(args.admin_key_file)
    status, answer = call(args.admin, path, args.argument, keys[0] if keys else None, args.limit)
    if status != 200:
        raise EngineError(f"{args.verb or 'the list of verbs'} was refused: {answer.get('error', answer)}")
    if args.verb is None:
        for verb in answer:
            print(f"{verb['verb']:<20} {verb['summary']} ({verb['access']})")
    else:
        print(json.dumps(answer, indent=2))
    return 0


def call(address: str, path: str, argument: str | None, key: str | None, limit: float) -> tuple[int, Any]:
    """Ask the admin surface at an address; the status and the JSON of its answer."""
    connection = _connection(address, limit)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        connection.request(
            "GET" if path.partition("?")[0] == "/admin" else "POST", path, body=argument or "null", headers=headers
        )
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise EngineError(
            f"no admin surface answers at {address!r}: {error}; start the server with --admin"
        ) from error
    finally:
        connection.close()


def _connection(address: str, limit: float) -> http.client.HTTPConnection:
    found = admin_address_of(address)
    if found.path is None:
        return http.client.HTTPConnection(found.host, found.port, timeout=limit)
    if not found.path:
        raise ConfigError(f"--admin is {address!r} but must be unix:PATH or HOST:PORT")
    return _UnixConnection(found.path, limit)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, limit: float) -> None:
        super().__init__("localhost", timeout=limit)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
