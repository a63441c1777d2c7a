"""What structured output adds to a decode step on a GPU: 64 rows under a JSON schema beside 64 free ones.

    python benchmarks/structured_gpu.py [--rows 64] [--steps 200] [--out FILE]

The model has dummy weights and qwen3-0.6b's shape and vocabulary; the time of a step is the median between outputs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpu import SHAPES, Bench
from report import environment
from structured import SCHEMA, made_up

from quire.structured.sources import make_source
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from quire.types.structured import GrammarSource, StructuredOutputsParams

MODEL = "qwen3-0.6b"
# So many objects that no row comes to its end while it is measured.
LONG = {"type": "array", "items": SCHEMA, "minItems": 1000}


def step_ms(
    bench: Bench, rows: int, steps: int, context: int, grammar: GrammarSource | None, **sampling: Any
) -> float:
    """Median milliseconds from one step's outputs to the next's, all rows decoding; greedy unless told otherwise."""
    chosen = {"temperature": 0.0, **sampling}
    params = SamplingParams(max_tokens=steps, ignore_eos=True, detokenize=False, **chosen)
    for index in range(rows):
        bench.client.add_request(
            EngineRequest(
                request_id=f"{grammar is None}-{index}-{time.perf_counter()}",
                token_ids=bench.prompt(context),
                params=params,
                max_tokens=steps,
                grammar=grammar,
            )
        )
    times = []
    while bench.client.has_unfinished():
        outputs = bench.client.get_outputs().outputs
        assert all(output.error is None for output in outputs), outputs
        if len(outputs) == rows:
            times.append(time.perf_counter())
    assert len(times) > steps // 2, f"only {len(times)} full steps"
    return 1e3 * statistics.median(later - earlier for earlier, later in pairwise(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    bench = Bench(MODEL)
    vocab_size = SHAPES[MODEL]["vocab_size"]
    bench.client.call("set_vocabulary", made_up(vocab_size))
    grammar = make_source(StructuredOutputsParams(json=LONG))
    results = {}
    for context in (64, 1024):
        for _ in range(2):  # the first run compiles kernels, records steps and loads the grammar
            free = step_ms(bench, args.rows, args.steps, context, None)
            constrained = step_ms(bench, args.rows, args.steps, context, grammar)
        added = constrained - free
        results[f"context {context}"] = {"free, ms": free, "JSON schema, ms": constrained, "added, ms": added}
        print(f"context {context}: {free:.3f} ms free, {constrained:.3f} ms under a schema", flush=True)
    bench.client.shutdown()
    if args.out is not None:
        report = {"environment": environment("torch", "triton", "llguidance"), "rows": args.rows, "results": results}
        args.out.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
