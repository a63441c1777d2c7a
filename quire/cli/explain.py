"""`quire explain DUMP`: what an engine that died, and each of its requests, was doing."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="DUMP", type=Path, help="a file of --dump-dir; the log names it when one dies"
    )


def run(args: argparse.Namespace) -> int:
    from quire.replay.dumps import Flight, explain

    print("\n".join(explain(Flight(args.file))))
    return 0
