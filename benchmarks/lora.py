"""LoRA on a GPU: the rows of the GPU table with adapters in every batch, and with adapters enabled but unused.

    python benchmarks/lora.py [--model llama-8b] [--adapters 8] [--rank 16] [--rows decode batch prefill throughput]
                              [--batches 16 64 256] [--parts adapters enabled off] [--profile 1 64]
                              [--out FILE]

Adapters are random, on all linear layers; requests take them in turn. vLLM's figures were measured on an H200 with
the same shapes. `enabled`: no request has an adapter; `off`: an engine without them, beside which that is to be at
most 2 % slower. `--profile`: kernels of a decode step of these batches by their time, before the rows.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from pathlib import Path

import torch
from gpu import BATCHES, SHAPES, Bench, free_memory, measure
from gpu_profile import show_decode
from report import environment
from safetensors.torch import save_file

from quire.loader.adapter_files import adapter_ref
from quire.types.request import AdapterRef

# Row -> (vLLM 0.24, reach at least), of llama-8b with eight adapters of rank 16.
WANTED = {
    "decode batch 1, ms": (6.74, 4.7),
    "decode batch 16, tok/s": (1663, 2700),
    "decode batch 64, tok/s": (5247, 8000),
    "decode batch 256, tok/s": (10764, 13000),
    "prefill 8k, ms": (270, 220),
    "512 x (512 in, 256 out), tok/s": (7354, 9600),
}


def make_adapter(folder: Path, model: str, rank: int, seed: int) -> AdapterRef:
    """A folder as PEFT saves it."""
    shape = SHAPES[model]
    hidden, width, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    query, key = dim * shape["num_attention_heads"], dim * shape["num_key_value_heads"]
    sizes = {
        "self_attn.q_proj": (hidden, query),
        "self_attn.k_proj": (hidden, key),
        "self_attn.v_proj": (hidden, key),
        "self_attn.o_proj": (query, hidden),
        "mlp.gate_proj": (hidden, width),
        "mlp.up_proj": (hidden, width),
        "mlp.down_proj": (width, hidden),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, (inputs, outputs) in sizes.items():
            base = f"base_model.model.model.layers.{layer}.{name}"
            down = torch.randn(rank, inputs, generator=generator) * 0.01
            tensors[f"{base}.lora_A.weight"] = down.to(torch.bfloat16)
            tensors[f"{base}.lora_B.weight"] = (
                torch.randn(outputs, rank, generator=generator).to(torch.bfloat16) * 0.01
            )
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return adapter_ref(folder.name, str(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-8b", choices=list(SHAPES))
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", nargs="+", default=["decode", "batch", "prefill", "throughput"])
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--profile", nargs="*", type=int, default=[])
    parser.add_argument("--parts", nargs="+", default=["adapters", "enabled", "off"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    root = Path(tempfile.mkdtemp())
    adapters = [
        make_adapter(root / f"adapter{index}", args.model, args.rank, index) for index in range(args.adapters)
    ]
    for part in args.parts:
        settings = {"enable_lora": True, "max_loras": args.adapters, "max_lora_rank": args.rank}
        bench = Bench(args.model, **({} if part == "off" else settings))
        bench.adapters = list(adapters) if part == "adapters" else [None]
        print(f"{args.model}, {part}: ready in {bench.ready:.1f} s", flush=True)
        # Adapters are read at their first use.
        bench.run([bench.prompt(16) for _ in bench.adapters], [1] * len(bench.adapters))
        for batch in args.profile if part == "adapters" else ():
            show_decode(bench, batch, 24)
        results[part] = measure(bench, args.rows, args.batches)
        bench.client.shutdown()
        del bench
        gc.collect()
        free_memory()
        if args.out is not None:
            report = {"environment": environment("torch", "triton"), "results": results}
            args.out.write_text(json.dumps(report, indent=2))
    for row, off in results.get("off", {}).items():
        slower = results["enabled"][row] / off if row.endswith("ms") else off / results["enabled"][row]
        print(f"{row:34} enabled {slower:.4f} x off, wanted at most 1.02")
    for row, (vllm, wanted) in WANTED.items():
        if row in results.get("adapters", {}):
            value = results["adapters"][row]
            reached = value <= wanted if row.endswith("ms") else value >= wanted
            print(f"{row:34} {value:10.3f}  vLLM {vllm:>8}  wanted {wanted:>8}  {'yes' if reached else 'NO'}")


if __name__ == "__main__":
    main()
