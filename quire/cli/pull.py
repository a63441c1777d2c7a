"""`quire pull MODEL`: download a model, so that it is here when it is needed."""

from __future__ import annotations

import argparse

from quire.loader.hub import resolve_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a built-in name or a hub id of the form ORG/NAME")
    parser.add_argument("--revision", metavar="TEXT", help="branch, tag or commit of a hub model")


def run(args: argparse.Namespace) -> int:
    source = resolve_model(args.model, args.revision)
    print(f"{args.model} is in {source.path}")
    return 0
