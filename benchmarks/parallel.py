"""What sharing the work costs and gives: routing decisions, plans to eight ranks, and two ranks beside two threads.

Run: python benchmarks/parallel.py [--parts router fanout ranks] [--output benchmarks/results/parallel.json]

`router` drives the real router through simulated replicas; rates are of this thread's CPU time, so that a busy
machine changes them little. `fanout` is the engine's own time to hand a decode step's plan to eight ranks: encoding
it, writing it into the ring, and a notice to each. `ranks` needs a quiet machine for some three minutes: tokens a
second of a model of the shape of Llama 3.2 1B with made-up weights, in one process with two threads and in two ranks
with one thread each, by turns, best of the rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from router_loads import BLOCKS, CHOICES, Cache, conversations, names, routed_hits, waits

from quire import LLM, SamplingParams
from quire.bench.report import environment, write_report
from quire.parallel.shared_memory import SharedMemory
from quire.types.step import StepPlan
from quire.worker.rank_messages import Execute
from quire.worker.ring import NOTICE, RingWriter, ring_bytes

NUM_RANKS = 8
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def router_rows() -> dict[str, float]:
    prompts = conversations(6000)
    hits, most, rates = 0, 0, []
    for _ in range(5):
        hits, seconds = routed_hits(prompts)
        rates.append(len(prompts) / seconds)
    big = Cache(4 * BLOCKS)
    most = sum(big.take(names(prompt))[0] for prompt in prompts)
    at = len(prompts) * 99 // 100
    routed, blind, oracle = (waits(prompts, choice)[at] for choice in CHOICES)
    return {
        "decisions_per_second": max(rates),
        "mean_prompt_tokens": statistics.mean(map(len, prompts)),
        "hits_of_one_big_cache": hits / most,
        "p99_wait_of_least_loaded": routed / blind,
        "p99_wait_of_oracle": routed / oracle,
    }


def fanout_rows(num_rows: int, count: int = 3000) -> dict[str, float]:
    """Microseconds of the engine's thread for each plan of `num_rows` decoding rows."""
    memory = SharedMemory(ring_bytes(NUM_RANKS))
    ring, pairs = RingWriter(memory, NUM_RANKS), [socket.socketpair() for _ in range(NUM_RANKS)]
    plan, nothing = StepPlan(1, list(range(num_rows)), [1] * num_rows), np.empty(0, dtype=np.uint8)
    wall, cpu = [], []
    for _ in range(count):
        begin, cpu_begin = time.perf_counter(), time.thread_time()
        notice = ring.write(msgspec.msgpack.encode(Execute(plan)), nothing, lambda: None)
        assert notice is not None
        for ours, _ in pairs:
            ours.sendall(notice)
        wall.append((time.perf_counter() - begin) * 1e6)
        cpu.append((time.thread_time() - cpu_begin) * 1e6)
        position, header, _ = NOTICE.unpack(notice)
        for rank, (_, theirs) in zip(ring.ranks, pairs, strict=True):
            theirs.recv(NOTICE.size)
            rank.position = position + header
    for pair in pairs:
        for end in pair:
            end.close()
    memory.close()
    return {"median_us": statistics.median(wall), "median_cpu_us": statistics.median(cpu)}


def ranks_rows(rounds: int) -> dict[str, Any]:
    """Tokens a second, best of the rounds, while eight requests decode; and prompt tokens a second."""
    found: dict[str, Any] = {"decode": {}, "prefill": {}}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPE))
        common: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 1024}
        kinds = {"2 threads": {"num_threads": 2}, "2 ranks": {"tensor_parallel_size": 2, "num_threads": 1}}
        engines = {name: LLM(folder, **common, **kind) for name, kind in kinds.items()}
        rng = random.Random(0)
        for _ in range(rounds):
            for name, llm in engines.items():
                for what, prompt, length in (("decode", 4, 32), ("prefill", 64, 1)):
                    prompts = [{"prompt_token_ids": rng.choices(range(1000), k=prompt)} for _ in range(8)]
                    tokens = 8 * (length if what == "decode" else prompt)
                    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
                    begin = time.perf_counter()
                    llm.generate(prompts, params, use_tqdm=False)
                    rate = tokens / (time.perf_counter() - begin)
                    found[what][name] = max(rate, found[what].get(name, 0.0))
        for llm in engines.values():
            llm.shutdown()
    for rates in found.values():
        rates["ratio"] = rates["2 ranks"] / rates["2 threads"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["router", "fanout", "ranks"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--note", default="", help="what else ran on the machine")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    if "router" in args.parts:
        results["router"] = router_rows()
    if "fanout" in args.parts:
        results["fanout"] = {f"{rows} rows": fanout_rows(rows) for rows in (8, 64, 256)}
    if "ranks" in args.parts:
        results["ranks"] = ranks_rows(args.rounds)
    print(json.dumps(results, indent=2))
    if args.output is not None:
        write_report(args.output, environment("torch"), results, note=args.note)


if __name__ == "__main__":
    main()
