"""A million requests in virtual time: how long `quire plan` takes for them, and how much memory.

    python benchmarks/million.py [--requests 1000000] [--machine epyc-2-cores] [--model smollm2]

Each has 128 tokens in and 64 out; at most 256 are in the engine at once. The limits are 10 minutes of one core and
2 GB.
"""

from __future__ import annotations

import argparse
import resource
import time

from report import environment, write_results

from quire.replay.capacity import measure, with_settings
from quire.replay.costs import find_table
from quire.replay.workload import Workload

LIMITS = {"cpu_seconds": 600.0, "bytes": 2e9}
AT_ONCE = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--machine", default="epyc-2-cores")
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    table = find_table(args.machine, args.model)
    # No target for step times: it would let a slow machine run a few of the 256 at a time.
    roomy = {"max_num_seqs": AT_ONCE, "max_num_batched_tokens": 2048, "kv_blocks": 8192, "step_time_target": 0}
    setup = with_settings(table.setup, roomy)
    load = Workload(num_prompts=args.requests, input_len=128, output_len=64, max_concurrency=AT_ONCE)
    begin, began = time.process_time(), time.monotonic()
    found = measure(setup, table, load.arrivals(), max_concurrency=AT_ONCE)
    results = {
        "requests": found.completed,
        "cpu_seconds": time.process_time() - begin,
        "wall_seconds": time.monotonic() - began,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "virtual_seconds": found.duration_s,
        "peak_running": found.peak_running,
        "limits": LIMITS,
    }
    print(results)
    print(f"written to {write_results('million', environment('quire'), results)}")


if __name__ == "__main__":
    main()
