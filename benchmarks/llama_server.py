"""llama.cpp's own HTTP server, from the package xllamacpp: `python llama_server.py MODEL.gguf PORT SLOTS TOKENS`.

Runs in the environment that benchmarks/peers.py makes; imports nothing of Quire.
"""

from __future__ import annotations

import os
import signal
import sys

import xllamacpp


def main() -> None:
    model, port, slots, tokens = sys.argv[1], *map(int, sys.argv[2:5])
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_parallel = slots
    params.n_ctx = slots * tokens
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count() or 1
    stop = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)  # before there are threads, which inherit it
    server = xllamacpp.Server(params)
    print("listening on", server.listening_address, flush=True)
    signal.sigwait(stop)
    os._exit(0)


if __name__ == "__main__":
    main()
