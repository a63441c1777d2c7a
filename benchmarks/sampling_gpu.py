"""What sampling parameters add to a decode step on a GPU: 64 rows with each of them beside 64 plain ones.

    python benchmarks/sampling_gpu.py [--rows 64] [--steps 120] [--context 64] [--out FILE]

Each is measured as it runs, and sampled from the host as rows are that do not fit into recorded steps.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gpu import Bench
from report import environment
from structured_gpu import MODEL, step_ms

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 0.8, top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "16 biases": {"logit_bias": {1000 * token: 1.0 for token in range(16)}},
    "8 bad words of 2 tokens": {"bad_words_token_ids": tuple((100 + word, 200 + word) for word in range(8))},
    "allowed tokens": {"allowed_token_ids": list(range(100, 10000))},
    "all penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2},
    "log-probabilities of the token": {"logprobs": 0},
    "log-probabilities of the 5 likeliest": {"logprobs": 5},
    "log-probabilities of the 20 likeliest": {"logprobs": 20},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    bench = Bench(MODEL)
    results: dict[str, dict[str, float]] = {}

    def measure(sampling: dict[str, Any]) -> float:
        step_ms(bench, args.rows, 16, args.context, None, **sampling)  # compiles kernels and records steps
        return step_ms(bench, args.rows, args.steps, args.context, None, **sampling)

    for name, sampling in KINDS.items():
        recorded = measure(sampling)
        with patch("quire.runner.sampling.sampler.Sampler.recorded_kind", return_value=None):
            from_host = measure(sampling)
        results[name] = {"recorded, ms": recorded, "from the host, ms": from_host}
        print(f"{name:40} {recorded:8.3f} ms, from the host {from_host:8.3f}", flush=True)
    bench.client.shutdown()
    if args.out is not None:
        settings = {"rows": args.rows, "steps": args.steps, "context": args.context}
        report = {"environment": environment("torch", "triton"), **settings, "results": results}
        args.out.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
