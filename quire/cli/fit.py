"""`quire fit MODEL`: the memory ledger of a model on this machine, without loading its weights."""

from __future__ import annotations

import argparse

from quire.config.args import add_engine_arguments, engine_config_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    config = engine_config_from(args)
    from quire.engine.settings import check_settings

    check_settings(config)
    from quire.worker.planning import plan_memory  # imports torch: only once the arguments are known to be good

    print(plan_memory(config).format())
    return 0
