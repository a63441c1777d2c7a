"""`quire stop SERVER`: ask a server to finish what it does and leave, and wait until it has."""

from __future__ import annotations

import argparse
import time

from quire.server.state import ServerState, is_running, running_servers, terminate
from quire.types.errors import ConfigError, EngineError

_POLL_SECONDS = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("server", nargs="?", metavar="SERVER", help="its model, address, port or pid; see quire ps")
    parser.add_argument("--all", action="store_true", help="stop all of them")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="how long to wait for its end. Default: 60."
    )


def run(args: argparse.Namespace) -> int:
    if args.server is None and not args.all:
        running = sorted(f"{', '.join(state.models)} at {state.address}" for state in running_servers())
        raise ConfigError(
            f"give the server to stop, or --all; running: {'; '.join(running)}"
            if running
            else "no server runs here; `quire serve` starts one"
        )
    servers = running_servers() if args.all else [choose_server(args.server)]
    for state in servers:
        if terminate(state):
            wait_for_end(state, args.timeout)
        print(f"stopped {', '.join(state.models)} at {state.address}")
    return 0


def choose_server(name: str | None) -> ServerState:
    """The server that a word means; ConfigError if it is none or several."""
    servers = running_servers()
    found = [state for state in servers if name is None or {name, name.removesuffix(":latest")} & names_of(state)]
    if len(found) == 1:
        return found[0]
    what = "server" if name is None else f"server {name!r}"
    if not found:
        raise ConfigError(f"no {what} runs here; `quire ps` lists those that do")
    raise ConfigError(f"{len(found)} servers fit ({', '.join(state.address for state in found)}); give an address")


def names_of(state: ServerState) -> set[str]:
    port = state.address.rpartition(":")[2]
    return {*state.models, state.address, state.address.partition("://")[2], port, str(state.pid)} - {""}


def wait_for_end(state: ServerState, timeout: float) -> None:
    limit = time.monotonic() + timeout
    while is_running(state):
        if time.monotonic() > limit:
            raise EngineError(
                f"the server at {state.address} (pid {state.pid}) has not ended within {timeout:g} s; it may still"
                " finish requests: see its --drain-timeout"
            )
        time.sleep(_POLL_SECONDS)
