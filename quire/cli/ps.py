"""`quire ps`: the servers of this user that run on this machine."""

from __future__ import annotations

import argparse
import json

import msgspec

from quire.cli.list import age
from quire.cli.table import print_table
from quire.server.state import running_servers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace) -> int:
    servers = running_servers()
    if args.json:
        print(json.dumps([msgspec.to_builtins(state) for state in servers], indent=2))
        return 0
    rows = [[", ".join(state.models), state.address, str(state.pid), age(state.started_at)] for state in servers]
    print_table(["MODEL", "ADDRESS", "PID", "STARTED"], rows)
    if not servers:
        print("No server runs. `quire serve` starts one.")
    return 0
