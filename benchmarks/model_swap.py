"""How long a request waits for a model that sleeps: two models take turns in memory that holds one.

    python benchmarks/model_swap.py (MODEL OTHER | --shape llama-8b) [--repeats 5] [--flags --max-model-len 8192]

`quire serve --models` on two models whose KV blocks take all of the budget, so that one of them sleeps. Requests of
one token alternate between the two; each waits for the other model to go to sleep and for its own to wake. `--shape`
makes both of dummy weights, as benchmarks/gpu.py does. Beside it: how fast this machine copies pinned memory.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from pathlib import Path

import httpx
import torch
from gpu import SHAPES
from report import environment, write_results
from takeover import server, wait_line

MOVED = re.compile(r"model (\w+) is (awake|asleep|dropped) after ([\d.]+) s")
BODY = {"prompt": [5] * 32, "max_tokens": 1, "ignore_eos": True}


def seconds_of(client: httpx.Client, model: str) -> float:
    begin = time.perf_counter()
    client.post("/v1/completions", json={"model": model, **BODY}).raise_for_status()
    return time.perf_counter() - begin


def copy_rates(num_bytes: int = 4 << 30) -> dict[str, float]:
    """Bytes a second of copies between pinned host memory and the GPU; none without a GPU."""
    if not torch.cuda.is_available():
        return {}
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    rates = {}
    for name, target, source in (("to the host", host, device), ("to the device", device, host)):
        seconds = []
        for _ in range(3):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            target.copy_(source)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        rates[name] = num_bytes / min(seconds)
    del host, device
    torch.cuda.empty_cache()
    return rates


def dummy_models(root: Path, shape: str) -> list[str]:
    """Two folders with the config of a shape of benchmarks/gpu.py."""
    config = {"max_position_embeddings": 40960, "hidden_act": "silu", "eos_token_id": 2, **SHAPES[shape]}
    for name in ("first", "second"):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    return [str(root / name) for name in ("first", "second")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--shape", choices=list(SHAPES), help="of dummy weights, in place of models")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--budget", help="memory_budget of the file; what is free, if absent")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="engine flags for both")
    args = parser.parse_args()
    if len(args.models) != (0 if args.shape else 2):
        parser.error("name two models, or a --shape")
    rates = copy_rates()
    for name, rate in rates.items():
        print(f"pinned memory {name}: {rate / 1e9:.1f} GB/s", flush=True)
    budget = f'memory_budget = "{args.budget}"\n' if args.budget else ""
    with tempfile.TemporaryDirectory() as folder:
        models, flags = args.models, args.flags
        if args.shape:
            models = dummy_models(Path(folder), args.shape)
            flags = ["--load-format", "dummy", "--skip-tokenizer-init", *flags]
        tables = "".join(f'[models.m{number}]\nmodel = "{name}"\n' for number, name in enumerate(models))
        path = Path(folder) / "models.toml"
        path.write_text(f"{budget}min_residence = 0.1\n{tables}")
        with server("--models", str(path), *flags) as process:
            url = wait_line(process, r"serving on (http://\S+), ready")
            with httpx.Client(base_url=url, timeout=600) as client:
                loads = [seconds_of(client, model) for model in ("m0", "m1")]
                swaps = [seconds_of(client, f"m{turn % 2}") for turn in range(2 * args.repeats)]
                stays = [seconds_of(client, "m1") for _ in range(args.repeats)]
            process.terminate()
            log = process.stderr.read() if process.stderr is not None else ""
    moves: dict[str, list[float]] = {}
    for _, place, seconds in MOVED.findall(log):
        moves.setdefault(place, []).append(float(seconds))
    results = {
        "models": args.models or [args.shape] * 2,
        "copy rates": rates,
        "loads": loads,
        "swaps": swaps,
        "stays": stays,
        "moves": moves,
    }
    print(f"first requests: {', '.join(f'{each:.2f}' for each in loads)} s")
    print(f"a request that swaps: median {statistics.median(swaps):.2f} s, at most {max(swaps):.2f} s")
    print(f"a request that does not: median {statistics.median(stays):.3f} s")
    for place, seconds in moves.items():
        print(f"{place}: median {statistics.median(seconds):.2f} s of {len(seconds)}")
    print(f"written to {write_results('model_swap', environment('quire', 'torch'), results)}")


if __name__ == "__main__":
    main()
