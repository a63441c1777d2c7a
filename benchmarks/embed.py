"""MiniLM on the CPU beside sentence-transformers (torch), ONNX Runtime and OpenVINO, in one run, alternating.

    python benchmarks/embed.py [--repeats 7] [--threads 2]
    python benchmarks/embed.py --quire-only    # its memory too, into results/embed_memory.json

All compute float32 on the same threads and get token ids; the last two run one ONNX file that is exported from the
same weights, with mean pooling and normalization inside. Times on a shared machine move, so the result is the ratio
of the best runs. A peer that is not installed is left out and named.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import environment, write_results
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from quire import LLM
from quire.loader.hub import resolve_model

Embed = Callable[[list[list[int]]], Any]
SHAPES = {"32 x 128 tokens": (32, 128), "one of 16 tokens": (1, 16)}


class Mean(nn.Module):
    """An encoder with mean pooling and normalization, as a sentence-transformers folder has them."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(hidden.dtype)
        return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--quire-only", action="store_true", help="for the memory of a process that does nothing else"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    engines: dict[str, Embed] = {"quire": quire_engine(args.threads)}
    if not args.quire_only:
        with tempfile.TemporaryDirectory() as folder:
            engines |= peers(Path(folder), args.threads)
    generator = np.random.default_rng(0)
    results: list[dict[str, Any]] = []
    for row, (count, length) in SHAPES.items():
        best = dict.fromkeys(engines, float("inf"))
        for _ in range(args.repeats):
            batch = [[101, *generator.integers(1000, 30000, length - 2).tolist(), 102] for _ in range(count)]
            vectors: dict[str, Any] = {}
            for name, embed in engines.items():
                started = time.perf_counter()
                vectors[name] = np.asarray(embed(batch))
                best[name] = min(best[name], time.perf_counter() - started)
            for name, found in vectors.items():
                assert np.abs(found - vectors["quire"]).max() < 1e-4, f"{name} gives other vectors"
        others = [seconds for name, seconds in best.items() if name != "quire"]
        results.append({"row": row, "seconds": best} | ({"ratio": min(others) / best["quire"]} if others else {}))
    show(results, list(engines))
    name = "embed"
    if args.quire_only:
        name, megabytes = "embed_memory", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"peak memory of this process: {megabytes:.0f} MB")
        results = [{"row": "peak memory of the process", "megabytes": megabytes}]
    path = write_results(name, environment("torch", "transformers", "quire"), results)
    print(f"written to {path}")


def quire_engine(threads: int) -> Embed:
    llm = LLM("minilm", num_threads=threads)

    def embed(batch: list[list[int]]) -> Any:
        return [output.outputs.embedding for output in llm.embed(batch, use_tqdm=False)]

    return embed


def peers(folder: Path, threads: int) -> dict[str, Embed]:
    import transformers

    source = resolve_model("minilm").path
    model = Mean(transformers.AutoModel.from_pretrained(source)).eval()
    found: dict[str, Embed] = {}

    def arrays(batch: list[list[int]]) -> dict[str, Any]:
        ids = np.array(batch, dtype=np.int64)
        return {"input_ids": ids, "attention_mask": np.ones_like(ids)}

    try:
        from sentence_transformers import SentenceTransformer

        sentence = SentenceTransformer(str(source), device="cpu")

        def by_sentence(batch: list[list[int]]) -> Any:
            with torch.inference_mode():
                given = {name: torch.from_numpy(value) for name, value in arrays(batch).items()}
                return sentence(given)["sentence_embedding"].numpy()

        found["sentence-transformers"] = by_sentence
    except ImportError as error:
        print(f"without sentence-transformers: {error}")

        def by_torch(batch: list[list[int]]) -> Any:
            with torch.inference_mode():
                return model(*(torch.from_numpy(value) for value in arrays(batch).values())).numpy()

        found["transformers"] = by_torch
    file = folder / "minilm.onnx"
    example = tuple(torch.from_numpy(value) for value in arrays([[101, 2000, 102]] * 2).values())
    axes = {name: {0: "batch", 1: "length"} for name in ("input_ids", "attention_mask")}
    torch.onnx.export(
        model, example, str(file), input_names=list(axes), output_names=["vector"], dynamic_axes=axes, dynamo=False
    )
    try:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        found["onnxruntime"] = lambda batch: session.run(None, arrays(batch))[0]
    except ImportError as error:
        print(f"without onnxruntime: {error}")
    try:
        import openvino

        kind = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
        compiled = openvino.Core().compile_model(str(file), "CPU", kind)
        found["openvino"] = lambda batch: compiled(arrays(batch))[0]
    except ImportError as error:
        print(f"without openvino: {error}")
    return found


def show(results: list[dict[str, Any]], names: list[str]) -> None:
    table = Table(title="MiniLM, best milliseconds")
    for column in ("", *names, "best peer / quire"):
        table.add_column(column)
    for result in results:
        ratio = f"{result['ratio']:.2f}" if "ratio" in result else "-"
        table.add_row(result["row"], *(f"{result['seconds'][name] * 1e3:.2f}" for name in names), ratio)
    Console().print(table)


if __name__ == "__main__":
    main()
