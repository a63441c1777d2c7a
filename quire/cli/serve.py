"""`quire serve [MODEL]`: an OpenAI-compatible HTTP server on a model, or on several with --models FILE."""

from __future__ import annotations

import argparse
from typing import Any

from quire.cli.parser import Parser
from quire.config.args import (
    add_engine_arguments,
    add_server_arguments,
    engine_config_from,
    engine_settings_from,
    server_config_from,
)
from quire.config.groups import ServerConfig
from quire.config.models_file import read_models
from quire.types.errors import ConfigError

COMMON = (
    *("--host", "--port", "--api-key", "--served-model-name", "--max-model-len", "--max-num-seqs"),
    *("--quantization", "--kv-cache-memory", "--device", "--tool-call-parser"),
)


def add_arguments(parser: Parser) -> None:
    parser.common = COMMON
    parser.spreads = True
    add_server_arguments(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    settings = server_config_from(args)
    if settings.models is not None:
        return _run_several(settings.models, engine_settings_from(args), settings)
    config = engine_config_from(args)
    # After the arguments are known to be good: these imports are slow.
    if settings.api_server_count > 1:
        from quire.server.processes.launch import run_processes

        run_processes(config, settings)
        return 0
    from quire.server.launch import run_server

    run_server(config, settings)
    return 0


def _run_several(path: str, defaults: dict[str, Any], settings: ServerConfig) -> int:
    if "model" in defaults:
        raise ConfigError(f"a model ({defaults['model']}) and --models are given; name the model in {path}")
    models = read_models(path, defaults, settings)
    if settings.api_server_count > 1:
        from quire.server.processes.launch import check_processes

        check_processes(settings)
    from quire.server.fleet.launch import run_fleet

    run_fleet(models, settings)
    return 0
