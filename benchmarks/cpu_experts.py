"""Quire beside llama.cpp on a mixture of experts, the same GGUF file, in one run, taking turns.

    python benchmarks/cpu_experts.py [--repeats 3] [--threads 2]

No real file is at hand: this one has the shape of granite-3.0-1b-a400m (24 layers, 32 experts of width 512, 8 a
token) with random Q4_K blocks, routers in float32, and the tokenizer of the default model. Routing is what random
weights make of it, alike for both engines. Writes results/cpu/experts.json.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import gguf
import numpy as np
from cpu_probes import Probe, Prompts, best, engine_rows, loaded
from numpy.typing import NDArray
from peers import HERE
from report import RESULTS, compile_as_installed, environment

from quire.bench.report import write_report
from quire.loader.hub import resolve_model

LAYERS, HIDDEN, WIDTH, EXPERTS, USED, HEADS, KV_HEADS = 24, 1024, 512, 32, 8, 16, 8
ROWS = ("decode", "prefill")
BLOCK, BLOCK_BYTES, STEP = 256, 144, 1e-4  # of Q4_K, and its scales


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    compile_as_installed()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "experts.gguf"
        write_model(model)
        print(f"{model.stat().st_size / 1e6:.0f} MB", flush=True)
        with ExitStack() as stack:
            probes = [
                stack.enter_context(start(name, model, args.threads, Path(folder))) for name in ("quire", "llama.cpp")
            ]
            results = measure(probes, args.repeats)
            results["memory"] = {probe.name: probe.peak_mb for probe in probes}
        results["file_mb"] = {"both": model.stat().st_size / 1e6}
    print(results)
    described = environment("quire", "torch", "xllamacpp") | {"note": "the machine was shared with other work"}
    print(write_report(RESULTS / "cpu" / "experts.json", described, results))


def start(name: str, model: Path, threads: int, folder: Path) -> AbstractContextManager[Probe]:
    argv = [sys.executable, str(HERE / "cpu_probe.py"), name, str(model), str(threads)]
    return loaded(name, argv, {"OMP_NUM_THREADS": str(threads)}, folder / f"{name}.log")


def measure(probes: list[Probe], repeats: int) -> dict[str, dict[str, float]]:
    """row -> engine -> best value, and Quire's as a multiple of llama.cpp's."""
    prompts = Prompts()
    for probe in probes:
        probe.generate(prompts(1, 128), 8)
    results: dict[str, dict[str, float]] = {}
    for row in ROWS:
        found: dict[str, list[float]] = {probe.name: [] for probe in probes}
        for _ in range(repeats):
            for probe in probes:
                found[probe.name].append(engine_rows(prompts)[row](probe))
        values = {name: best(row, of_engine) for name, of_engine in found.items()}
        results[row] = values | {"ratio": values["quire"] / values["llama.cpp"]}
        print(row, results[row], flush=True)
    return results


def write_model(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "granitemoe")
    source = gguf.GGUFReader(resolve_model("smollm2").path)
    vocab = 0
    for field in source.fields.values():
        if field.name.startswith("tokenizer."):
            kind = field.types[0]
            value = field.contents()
            writer.add_key_value(field.name, value, kind, field.types[-1] if len(field.types) > 1 else None)
            vocab = len(value) if field.name == "tokenizer.ggml.tokens" else vocab
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(vocab)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(USED)
    writer.add_attention_scale(0.015625)
    writer.add_embedding_scale(12.0)
    writer.add_residual_scale(0.22)
    writer.add_logit_scale(6.0)
    generator = np.random.default_rng(0)

    def matrix(name: str, *shape: int) -> None:
        data = q4_k(generator, int(np.prod(shape[:-1])), shape[-1]).reshape(*shape[:-1], -1)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.Q4_K)

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(HIDDEN, np.float32))

    matrix("token_embd.weight", vocab, HIDDEN)
    norm("output_norm.weight")
    narrow = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        place = f"blk.{layer}"
        norm(f"{place}.attn_norm.weight")
        norm(f"{place}.ffn_norm.weight")
        for part, rows in (("q", HIDDEN), ("k", narrow), ("v", narrow), ("output", HIDDEN)):
            matrix(f"{place}.attn_{part}.weight", rows, HIDDEN)
        router = generator.standard_normal((EXPERTS, HIDDEN), np.float32) * 0.05
        writer.add_tensor(f"{place}.ffn_gate_inp.weight", router)
        matrix(f"{place}.ffn_gate_exps.weight", EXPERTS, WIDTH, HIDDEN)
        matrix(f"{place}.ffn_up_exps.weight", EXPERTS, WIDTH, HIDDEN)
        matrix(f"{place}.ffn_down_exps.weight", EXPERTS, HIDDEN, WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def q4_k(generator: np.random.Generator, rows: int, inner: int) -> NDArray[np.uint8]:
    """Random codes and 6-bit scales; weights are about 0 because minima are 7.5 steps."""
    blocks = generator.integers(0, 256, (rows, inner // BLOCK, BLOCK_BYTES), dtype=np.uint8)
    blocks[..., :4] = np.array([STEP, 7.5 * STEP], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


if __name__ == "__main__":
    main()
