"""Quire beside llama.cpp on the same GGUF file of random blocks, in one run, taking turns.

    python benchmarks/cpu_experts.py [--shape granite-moe] [--repeats 3] [--threads 2]

Shapes (random_gguf.py): granite-moe, a mixture of experts; deepseek2, latent attention and experts; lfm2-350m and
granite-4.0-h-350m, hybrids of recurrent layers and attention. Routing is what random weights make of it, alike for
both engines. Writes results/cpu/SHAPE.json, of granite-moe experts.json.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from cpu_probes import Probe, Prompts, best, engine_rows, loaded
from peers import HERE
from random_gguf import SHAPES
from report import RESULTS, compile_as_installed, environment

from quire.bench.report import write_report

ROWS = ("decode", "prefill")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="granite-moe", choices=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    compile_as_installed()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.gguf"
        SHAPES[args.shape](model).close()
        print(f"{model.stat().st_size / 1e6:.0f} MB", flush=True)
        with ExitStack() as stack:
            probes = [
                stack.enter_context(start(name, model, args.threads, Path(folder))) for name in ("quire", "llama.cpp")
            ]
            results = measure(probes, args.repeats)
            results["memory"] = {probe.name: probe.peak_mb for probe in probes}
        results["file_mb"] = {"both": model.stat().st_size / 1e6}
    print(results)
    described = environment("quire", "torch", "xllamacpp")
    name = "experts" if args.shape == "granite-moe" else args.shape
    print(write_report(RESULTS / "cpu" / f"{name}.json", described, results))


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


if __name__ == "__main__":
    main()
