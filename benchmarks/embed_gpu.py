"""Embedding on a GPU with made-up weights: texts a second of large batches, and the time of one text.

    python benchmarks/embed_gpu.py [--model bert-base|qwen3-0.6b] [--repeats 3] [--profile] [--out FILE]

BERT-base in float16: 1,024 x 500 and 4,096 x 64 tokens, and one of 64; the shape of Qwen3-0.6B in bfloat16: 1,024 x
512 and 4,096 x 64, and one of 64. `--profile` prints for each row the kernels by their time, and the functions of the
host by theirs, of one run more.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import environment

from quire import LLM

BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "vocab_size": 30522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}
MODELS: dict[str, tuple[dict[str, Any], str, int]] = {
    "bert-base": (BERT, "float16", 500),
    "qwen3-0.6b": (QWEN3, "bfloat16", 512),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(MODELS), action="append")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = {name: measure(name, args.repeats, args.profile) for name in args.model or MODELS}
    if args.out is not None:
        report = {"environment": environment("torch", "triton"), "results": results}
        args.out.write_text(json.dumps(report, indent=2))


def measure(name: str, repeats: int, profiled: bool) -> dict[str, float]:
    config, dtype, length = MODELS[name]
    found: dict[str, float] = {}
    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        settings: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": dtype}
        with LLM(folder, device="cuda", runner="pooling", max_model_len=512, **settings) as llm:
            for count, tokens in ((1024, length), (4096, 64), (1, 64)):
                best = float("inf")
                for _ in range((repeats if count > 1 else 50) + 1):
                    batch = generator.integers(1000, 30000, (count, tokens)).tolist()
                    started = time.perf_counter()
                    llm.encode(batch, pooling_task="embed", use_tqdm=False)
                    best = min(best, time.perf_counter() - started)
                row = f"{count} x {tokens} tokens"
                found[f"{row}, texts/s"] = count / best
                found[f"{row}, ms"] = best * 1e3
                print(f"{name:12} {row:20} {count / best:10.0f} texts/s {best * 1e3:10.2f} ms", flush=True)
                if profiled:
                    show_profile(llm, batch)
    return found


def show_profile(llm: LLM, batch: list[list[int]]) -> None:
    """Where one run's time goes: kernels by their sum, and beside it the host's functions."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        llm.encode(batch, pooling_task="embed", use_tqdm=False)
        torch.cuda.synchronize()
    kernels: dict[str, tuple[int, float]] = {}
    for event in profile.events():
        count, total = kernels.get(event.name, (0, 0.0))
        kernels[event.name] = count + 1, total + event.device_time_total
    print(f"  kernels: {sum(total for _, total in kernels.values()) / 1e3:.2f} ms")
    for kernel, (count, total) in sorted(kernels.items(), key=lambda item: -item[1][1])[:16]:
        print(f"  {total / 1e3:9.3f} ms {count:6} x {total / count:9.1f} us  {kernel[:110]}")
    host = cProfile.Profile()
    host.runcall(llm.encode, batch, pooling_task="embed", use_tqdm=False)
    torch.cuda.synchronize()
    pstats.Stats(host).strip_dirs().sort_stats("tottime").print_stats(22)


if __name__ == "__main__":
    main()
