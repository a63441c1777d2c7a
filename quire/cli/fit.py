"""`quire fit MODEL`: the memory ledger of a model that is served here or elsewhere, without loading its weights."""

from __future__ import annotations

import argparse

from quire.config.args import add_engine_arguments, add_server_arguments, engine_config_from, server_config_from
from quire.config.engine import EngineConfig
from quire.config.machines import CARDS, Machine, parse_machine
from quire.types.errors import ConfigError, MemoryPlanError
from quire.types.ledger import LedgerLine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    add_server_arguments(parser, only=("spare_engine",))
    parser.add_argument(
        "--machine",
        metavar="CARDS",
        help="plan for GPUs that are not here, such as h200, 8xh200 or 2x8xh200 (two hosts of eight). Cards:"
        f" {', '.join(CARDS)}. Default: this machine.",
    )


def run(args: argparse.Namespace) -> int:
    config = engine_config_from(args)
    machine = None if args.machine is None else _machine(args.machine, config)
    from quire.engine.settings import check_settings
    from quire.engine.spare import SPARE_LINE

    check_settings(config)
    others = [SPARE_LINE] if server_config_from(args).spare_engine else []
    from quire.planning.engine_plan import plan_memory  # imports torch: only once the arguments are known to be good

    if config.parallel.parallel == "auto":
        config = _chosen(config, others, machine)
    stages = config.parallel.pipeline_parallel_size
    platform = None
    if machine is not None:
        from quire.cli.topology import platform_of

        platform = platform_of(machine)
        if config.device.device not in ("auto", platform.name):
            raise ConfigError(
                f"machine is {args.machine!r}, but device is {config.device.device!r}; leave one of the two out"
            )
    try:
        ledgers = [plan_memory(config, others, stage, platform=platform) for stage in range(stages)]
    except MemoryPlanError:
        _print_latents(config)
        raise
    for stage, ledger in enumerate(ledgers):
        print((f"stage {stage + 1} of {stages}\n" if stages > 1 else "") + ledger.format())
    _print_latents(config)
    if len({ledger.num_kv_blocks for ledger in ledgers}) > 1:
        least = min(ledger.num_kv_blocks for ledger in ledgers)
        print(f"every stage keeps {least} KV blocks, as many as the one that can keep fewest")
    return 0


def _print_latents(config: EngineConfig) -> None:
    """What latent attention keeps of a token, beside keys and values of all heads; nothing for other models."""
    from quire.loader.hub import find_model
    from quire.loader.model_config import load_config
    from quire.models.decoder import DecoderLM
    from quire.models.registry import model_class

    model_config = load_config(find_model(config.model))
    architecture = model_class(model_config)
    decoder = architecture.decoder_config(model_config) if issubclass(architecture, DecoderLM) else None
    if decoder is None or decoder.latent is None:
        return
    latent = decoder.latent
    of_index = "" if latent.index is None else f", and {latent.index.head_dim} of an index key"
    heads = decoder.num_heads * (latent.nope_dim + latent.rope_dim + latent.value_dim)
    print(
        f"latent cache: {latent.width} numbers of a token in a layer{of_index}; keys and values of"
        f" {decoder.num_heads} heads would be {heads}, {heads / latent.width:.1f} times as many"
    )


def _machine(text: str, config: EngineConfig) -> Machine:
    """The machine, if it has as many cards as the sizes need."""
    machine, parallel = parse_machine(text), config.parallel
    needed = parallel.num_ranks * parallel.data_parallel_size
    if machine.cards is not None and needed > machine.cards * machine.hosts:
        raise ConfigError(
            f"machine is {text!r} with {machine.cards * machine.hosts} cards, but -tp, -pp and -dp need {needed};"
            " lower them, or set --parallel auto"
        )
    return machine


def _chosen(config: EngineConfig, others: list[LedgerLine], machine: Machine | None) -> EngineConfig:
    from quire.cli.topology import plan_topology

    found = plan_topology(config, others, machine)
    print(f"topology: {found} on {'this machine' if machine is None else machine}\nwhy: {found.reason}")
    return config.with_sizes(found.tensor, found.stages, found.replicas)
