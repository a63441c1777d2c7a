"""Steps that verify drafts against steps without any, on dummy weights, with drafts that are always right or wrong.

    python benchmarks/speculation.py [--model llama-8b] [--batches 1 16 64] [--drafts 4] [--deterministic]
                                     [--device cuda] [--out FILE]

Every request may say one token only, so that what holds is known whatever the rounding: the drafter guesses that
token, or another. Rows without drafts ask for the same, so both do the same work for a token.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from gpu import SHAPES, Bench
from report import environment

from quire.engine.client import InProcClient
from quire.sched.drafts import Drafter, Drafts, NoDrafts
from quire.sched.request import Request

TOKEN, OTHER = 7, 8
TARGETS = {1: 3.6, 16: 2.5, 64: 1.5}  # speed-up with four right drafts, llama-8b on an H200


class Constant(Drafter):
    """Guesses the same token again and again."""

    name = "constant"
    default_tokens = 64

    def __init__(self, token: int, count: int) -> None:
        self._token, self._count = token, count

    def propose(self, request: Request, num_in_flight: int, limit: int) -> list[int]:
        return [self._token] * min(limit, self._count)


def measure(bench: Bench, batches: list[int], count: int) -> dict[str, dict[str, float]]:
    """Output tokens/s of each batch at context 1k, without drafts, with right ones and with wrong ones."""
    assert isinstance(bench.client, InProcClient)
    state = bench.client._core.scheduler._state
    kinds = {"none": NoDrafts(), "right": Drafts(Constant(TOKEN, count)), "wrong": Drafts(Constant(OTHER, count))}
    found: dict[str, dict[str, float]] = {}
    for batch in batches:
        rates = {}
        for name, drafting in kinds.items():
            state.drafting = drafting
            rates[name] = bench.decode_batch(batch, allowed_token_ids=[TOKEN])
        found[str(batch)] = rates
        target = TARGETS.get(batch)
        print(
            f"batch {batch}: {rates['none']:.0f} tok/s, with {count} right drafts {rates['right']:.0f} "
            f"({rates['right'] / rates['none']:.2f} x{f', target {target}' if target else ''}), with wrong ones "
            f"{rates['wrong']:.0f} ({rates['wrong'] / rates['none']:.2f} x)",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="llama-8b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    speculative: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": given.drafts}
    bench = Bench(given.model, device=given.device, deterministic=given.deterministic, speculative_config=speculative)
    results = measure(bench, given.batches, given.drafts)
    if given.out is not None:
        given.out.write_text(json.dumps({"environment": environment(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
