"""What structured output costs: compiling, microseconds per mask at 150,000 tokens, and of 64 rows at once.

    python benchmarks/structured.py [--tokens 150000] [--rows 64]

The vocabulary is made up, or taken from a model with --model.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import numpy as np
from report import environment, write_results

from quire.frontend.tokenizer import load_tokenizer
from quire.loader.hub import resolve_model
from quire.structured.base import Grammar, Matcher
from quire.structured.guidance import GuidanceBackend
from quire.structured.sources import make_source
from quire.types.masks import Masks
from quire.types.structured import StructuredOutputsParams, Vocabulary

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "notes": {"type": "array", "items": {"type": "object", "properties": {"text": {"type": "string"}}}},
    },
    "required": ["name", "age", "tags", "notes"],
}
GRAMMARS: dict[str, StructuredOutputsParams] = {
    "json_object": StructuredOutputsParams(json_object=True),
    "json": StructuredOutputsParams(json=SCHEMA),
    "regex": StructuredOutputsParams(regex=r"[A-Z][a-z]+ [0-9]{4}-[0-9]{2}-[0-9]{2}(, .{1,80})*"),
    "choice": StructuredOutputsParams(choice=[f"choice number {index}" for index in range(200)]),
    "enum of 5,000": StructuredOutputsParams(json={"enum": [f"value number {index}" for index in range(5000)]}),
    "1,000 optional": StructuredOutputsParams(
        json={"type": "object", "properties": {f"property_{index}": {"type": "string"} for index in range(1000)}}
    ),
}


def made_up(size: int) -> Vocabulary:
    """All bytes, then words as byte-pair encodings have them, then an end."""
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = {bytes([byte]): None for byte in range(256)}
    while len(pieces) < size - 1:
        word = "".join(rng.choices(letters, k=rng.randint(2, 9)))
        extra = rng.choice(["", " ", " ", '"', '":', ", ", "1", "_"])
        pieces[(extra + rng.choice([word, word.capitalize()])).encode()] = None
    return Vocabulary([*pieces, b"</s>"], [size - 1], [size - 1])


def of_model(name: str) -> Vocabulary:
    tokenizer = load_tokenizer(resolve_model(name, None).path)
    size = tokenizer.vocab_size
    special = [token for token in range(size) if tokenizer.is_special(token)]
    return Vocabulary([tokenizer.token_bytes(token) for token in range(size)], special, list(tokenizer.eos_token_ids))


def talk(backend: GuidanceBackend, matcher: Matcher, masks: Masks, rng: random.Random, steps: int) -> list[float]:
    """Seconds per mask along a random walk."""
    times = []
    for _ in range(steps):
        if matcher.is_complete:
            break
        begin = time.perf_counter()
        backend.fill([matcher], masks)
        times.append(time.perf_counter() - begin)
        choices = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))
        matcher.accept([int(rng.choice(choices))])
    return times


def _on_its_way(backend: GuidanceBackend, grammar: Grammar, masks: Masks, rng: random.Random, steps: int) -> Matcher:
    """A matcher after this number of tokens of an output, or at its beginning if the output was over by then."""
    matcher = grammar.matcher()
    talk(backend, matcher, masks, rng, steps)
    return grammar.matcher() if matcher.is_complete else matcher


def measure(
    backend: GuidanceBackend, params: StructuredOutputsParams, num_words: int, args: argparse.Namespace
) -> dict[str, float]:
    rng = random.Random(1)
    begin = time.perf_counter()
    source = make_source(params)
    checked = time.perf_counter()
    grammar = backend.compile(source)
    compiled = time.perf_counter()
    one = np.zeros((1, num_words), dtype=np.int32)
    times = [seconds for _ in range(args.walks) for seconds in talk(backend, grammar.matcher(), one, rng, args.steps)]
    matchers = [_on_its_way(backend, grammar, one, rng, row % args.steps) for row in range(args.rows)]
    masks = np.zeros((args.rows, num_words), dtype=np.int32)
    batch_times = []
    for _ in range(20):
        at = time.perf_counter()
        backend.fill(matchers, masks)
        batch_times.append(time.perf_counter() - at)
    return {
        "check_ms": 1e3 * (checked - begin),
        "compile_ms": 1e3 * (compiled - checked),
        "mask_us_median": 1e6 * statistics.median(times),
        "mask_us_p99": 1e6 * sorted(times)[int(0.99 * (len(times) - 1))],
        "mask_us_max": 1e6 * max(times),
        "batch_us_median": 1e6 * statistics.median(batch_times),
        "masks": len(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=150_000)
    parser.add_argument("--model", help="take the vocabulary of this model instead")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--walks", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    vocabulary = of_model(args.model) if args.model else made_up(args.tokens)
    begin = time.perf_counter()
    backend = GuidanceBackend(vocabulary)
    build_seconds = time.perf_counter() - begin
    num_words = -(-len(vocabulary.pieces) // 32)
    print(f"{len(vocabulary.pieces)} tokens, tree built in {build_seconds:.2f} s")
    columns = f"{'check ms':>9} {'compile ms':>11} {'mask us':>8} {'p99':>8} {'max':>8}"
    print(f"{'':16} {columns} {f'{args.rows} rows us':>11}")
    results = {}
    for name, params in GRAMMARS.items():
        found = results[name] = measure(backend, params, num_words, args)
        print(
            f"{name:16} {found['check_ms']:9.2f} {found['compile_ms']:11.2f} {found['mask_us_median']:8.0f}"
            f" {found['mask_us_p99']:8.0f} {found['mask_us_max']:8.0f} {found['batch_us_median']:11.0f}"
        )
    sizes = {"build_seconds": build_seconds, "num_tokens": len(vocabulary.pieces), "rows": args.rows}
    report = {**sizes, "grammars": results}
    print(f"written to {write_results('structured', environment('quire', 'llguidance'), report)}")


if __name__ == "__main__":
    main()
