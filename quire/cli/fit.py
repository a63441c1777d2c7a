"""`quire fit MODEL`: the memory ledger of a model that is served on this machine, without loading its weights."""

from __future__ import annotations

import argparse

from quire.config.args import add_engine_arguments, add_server_arguments, engine_config_from, server_config_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    add_server_arguments(parser, only=("spare_engine",))


def run(args: argparse.Namespace) -> int:
    config = engine_config_from(args)
    from quire.engine.settings import check_settings
    from quire.engine.spare import SPARE_LINE

    check_settings(config)
    others = [SPARE_LINE] if server_config_from(args).spare_engine else []
    from quire.planning.engine_plan import plan_memory  # imports torch: only once the arguments are known to be good

    stages = config.parallel.pipeline_parallel_size
    ledgers = [plan_memory(config, others, stage) for stage in range(stages)]
    for stage, ledger in enumerate(ledgers):
        print((f"stage {stage + 1} of {stages}\n" if stages > 1 else "") + ledger.format())
    if len({ledger.num_kv_blocks for ledger in ledgers}) > 1:
        least = min(ledger.num_kv_blocks for ledger in ledgers)
        print(f"every stage keeps {least} KV blocks, as many as the one that can keep fewest")
    return 0
