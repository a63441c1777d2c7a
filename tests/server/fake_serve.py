"""`quire serve` over the fake engine of tests/engine: `python -m tests.server.fake_serve FOLDER FLAGS`.

The folder's name holds the words that tell the fake engine what to do; the folder has a tokenizer and no weights.
"""

from __future__ import annotations

import argparse
import sys

from quire.config.args import add_engine_arguments, add_server_arguments, engine_config_from, server_config_from
from quire.config.engine import EngineConfig
from quire.engine.child import print_line
from quire.engine.zmq_client import OnPhase, ZmqClient
from quire.server.launch import run_server
from quire.server.logs import relay_engine_line
from quire.server.processes.launch import run_processes
from quire.types.errors import QuireError
from quire.utils.log import setup_logging
from tests.engine.fake_engine import COMMAND


def main() -> int:
    parser = argparse.ArgumentParser()
    add_server_arguments(parser)
    add_engine_arguments(parser)
    args = parser.parse_args()
    setup_logging("info")
    settings = server_config_from(args)
    config = engine_config_from(args)
    words = config.model.model.rpartition("/")[2]

    def launch(config: EngineConfig, on_phase: OnPhase) -> ZmqClient:
        take_line = relay_engine_line if settings.log_format == "json" else print_line
        fake = EngineConfig.from_flat(model=words)
        return ZmqClient(fake, command=COMMAND, on_phase=on_phase, take_line=take_line)

    try:
        run = run_processes if settings.api_server_count > 1 else run_server
        run(config, settings, launch)
    except QuireError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
