"""Quire beside transformers on the same weights, in one run, alternating: single-stream decode and a batch of 32.

    python benchmarks/vs_transformers.py [--repeats 3]

Both run float32 on all cores. Times on a shared machine move, so the result is the ratio of the best runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import environment, write_results
from rich.console import Console
from rich.table import Table

from quire import LLM, SamplingParams
from quire.loader.hub import resolve_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    llm = LLM(args.model, enable_prefix_caching=False)
    hf = load_transformers(resolve_model(args.model).path)
    generator = torch.Generator().manual_seed(0)

    def prompts(count: int) -> list[list[int]]:
        return torch.randint(100, 40000, (count, args.prompt_tokens), generator=generator).tolist()

    results: list[dict[str, Any]] = []
    for name, count in (("single stream", 1), (f"{args.batch} at once", args.batch)):
        best = {"quire": 0.0, "transformers": 0.0}
        for _ in range(args.repeats):
            batch = prompts(count)
            for engine, run in (("quire", run_quire), ("transformers", run_transformers)):
                rate = measure(run, llm if engine == "quire" else hf, batch, args.output_tokens, count == 1)
                best[engine] = max(best[engine], rate)
        results.append({"row": name, **best, "ratio": best["quire"] / best["transformers"]})
    show(results)
    path = write_results("vs_transformers", environment("torch", "transformers", "quire"), results)
    print(f"written to {path}")


def measure(run: Callable[..., None], engine: Any, batch: list[list[int]], outputs: int, decode_only: bool) -> float:
    """Output tokens per second; for a single stream without the prefill."""
    prefill = 0.0
    if decode_only:
        started = time.perf_counter()
        run(engine, batch, 1)
        prefill = time.perf_counter() - started
    started = time.perf_counter()
    run(engine, batch, outputs)
    elapsed = time.perf_counter() - started - prefill
    return len(batch) * (outputs - (1 if decode_only else 0)) / elapsed


def run_quire(llm: LLM, batch: list[list[int]], outputs: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True, detokenize=False)
    done = llm.generate([{"prompt_token_ids": ids} for ids in batch], params, use_tqdm=False)
    assert all(len(request.outputs[0].token_ids) == outputs for request in done)


def run_transformers(model: Any, batch: list[list[int]], outputs: int) -> None:
    ids = torch.tensor(batch)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=outputs,
            min_new_tokens=outputs,
            do_sample=False,
            pad_token_id=0,
        )
    assert out.shape[1] == ids.shape[1] + outputs


def load_transformers(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    if path.suffix == ".gguf":
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def show(results: list[dict[str, Any]]) -> None:
    table = Table("output tokens/s", "quire", "transformers", "ratio", title="Quire beside transformers, float32")
    for row in results:
        table.add_row(row["row"], f"{row['quire']:.1f}", f"{row['transformers']:.1f}", f"{row['ratio']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
