"""`quire serve [MODEL]`: an OpenAI-compatible HTTP server on a model."""

from __future__ import annotations

import argparse

from quire.cli.parser import Parser
from quire.config.args import add_engine_arguments, add_server_arguments, engine_config_from, server_config_from

COMMON = (
    *("--host", "--port", "--api-key", "--served-model-name", "--max-model-len", "--max-num-seqs"),
    *("--quantization", "--kv-cache-memory", "--device", "--tool-call-parser"),
)


def add_arguments(parser: Parser) -> None:
    parser.common = COMMON
    add_server_arguments(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    config, settings = engine_config_from(args), server_config_from(args)
    from quire.server.launch import run_server  # after the arguments are known to be good: this import is slow

    run_server(config, settings)
    return 0
