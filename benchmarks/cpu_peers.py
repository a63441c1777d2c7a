"""Quire beside its peers on the same weights and cores, in one run, taking turns; the best of each counts.

    python benchmarks/cpu_peers.py [--folder ~/.cache/quire-peers] [--engines quire llama.cpp ...] [--repeats 3]

Every engine is loaded once, in an environment of its own, and stopped (SIGSTOP) while another one is measured. Prints
a table with each row's aim and whether it is reached, and writes JSON and a picture to results/cpu/. The rows over
HTTP are measured by the client of benchmarks/server_peers.py, a server at a time. `--rows prefill batch` measures
these rows alone, and nothing else about the machine, and leaves the file's other rows as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cpu_peers_report import draw, show
from cpu_probes import GemmPeak, Probe, ProbeError, Prompts, best, engine_rows, loaded, seconds
from peers import (
    DEFAULT_FOLDER,
    HERE,
    PEERS,
    SERVERS,
    Running,
    convert_to_hf,
    install,
    prepare_model,
    running,
    version,
)
from report import RESULTS, compile_as_installed, environment
from server_peers import best_of, measure_server

from quire.bench.report import write_report
from quire.loader.hub import resolve_model

ENGINES = ("quire", "quire-int8", "llama.cpp", "llama.cpp-f32", "openvino", "vllm", "transformers")
HTTP_PROMPTS = 64
SLOW_START_S = 30.0  # an engine that takes longer is started once


def start(name: str, folder: Path, threads: int) -> AbstractContextManager[Probe]:
    """Load an engine in its own environment."""
    engine = name.removesuffix("-f32")
    python = install(engine, folder) if engine in PEERS else Path(sys.executable)
    extra = PEERS[engine].environment if engine in PEERS else {}
    argv = [str(python), str(HERE / "cpu_probe.py"), engine, model_for(name, folder), str(threads)]
    return loaded(name, argv, extra | {"OMP_NUM_THREADS": str(threads)}, folder / f"{name}-probe.log")


def model_for(name: str, folder: Path) -> str:
    """The default model's weights in the form an engine reads best."""
    gguf = resolve_model("smollm2").path
    if name == "llama.cpp-f32":
        target = folder / f"{gguf.stem}-f32.gguf"
        if not target.is_file():
            write_float_gguf(gguf, target)
        return str(target)
    if name == "transformers":
        target = folder / f"{gguf.stem}-hf"
        if not (target / "converted").is_file():
            convert_to_hf(gguf, target)
        return str(target)
    return prepare_model("quire" if name.startswith("quire") else name, folder)


def write_float_gguf(source: Path, target: Path) -> None:
    """The same model with every tensor unpacked to float32."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
    from gguf.quants import dequantize

    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        writer.add_key_value(field.name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, GGMLQuantizationType(tensor.tensor_type))
        writer.add_tensor(tensor.name, values.reshape(tensor.shape[::-1]).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def measure(
    probes: list[Probe], repeats: int, gemm: GemmPeak, rows: list[str] | None = None
) -> dict[str, dict[str, float]]:
    """row -> engine -> best value. The cores' own limit is measured before every turn."""
    prompts = Prompts()
    results: dict[str, dict[str, float]] = {}
    for probe in probes:
        probe.generate(prompts(1, 128), 8)  # whatever an engine does only once
    for row, run in engine_rows(prompts).items():
        if rows is not None and row not in rows:
            continue
        found: dict[str, list[float]] = {probe.name: [] for probe in probes}
        for _ in range(repeats):
            for probe in probes:
                if rows is None:
                    gemm.measure()
                found[probe.name].append(run(probe))
        results[row] = {name: best(row, values) for name, values in found.items()}
        if row == "decode":
            results["memory"] = {probe.name: probe.peak_mb for probe in probes}
        print(row, {name: round(value, 1) for name, value in results[row].items()}, flush=True)
    if rows is not None:
        return results
    results["memory_peak"] = {probe.name: probe.peak_mb for probe in probes}
    results["ready"] = {probe.name: probe.ready_s for probe in probes}
    return results


@contextmanager
def awake(server: Running) -> Iterator[None]:
    """Let a stopped server run."""
    os.killpg(server.process.pid, signal.SIGCONT)
    try:
        yield
    finally:
        os.killpg(server.process.pid, signal.SIGSTOP)


def measure_http(engines: list[str], folder: Path, repeats: int) -> dict[str, dict[str, float]]:
    """The two rows over HTTP, of engines with a server; each starts once and is stopped between its turns."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in engines if name in SERVERS}
    with ExitStack() as stack:
        servers = []
        for name in runs:
            server = stack.enter_context(running(name, folder))
            os.killpg(server.process.pid, signal.SIGSTOP)
            stack.callback(os.killpg, server.process.pid, signal.SIGCONT)
            servers.append(server)
            print(f"{name}: its server was ready after {server.start_seconds:.1f} s", flush=True)
        for repeat in range(repeats):
            for server in servers:
                with awake(server):
                    runs[server.peer].append(measure_server(server, num_prompts=HTTP_PROMPTS, seed=repeat))
    best_runs = {name: best_of(found) for name, found in runs.items()}
    return {
        "http_rate": {name: run["output_tokens_per_s"] for name, run in best_runs.items()},
        "http_ttft": {name: run["ttft_ms"]["p50"] / 1000 for name, run in best_runs.items()},
    }


def other_limits(threads: int, repeats: int = 30) -> dict[str, float]:
    """What the machine can do besides matmuls: reading memory, and importing torch."""
    torch.set_num_threads(threads)
    memory = torch.ones(1 << 28)
    read = min(seconds(memory.sum) for _ in range(repeats))
    argv = [sys.executable, "-c", "import torch"]
    imports = min(seconds(lambda: subprocess.run(argv, check=True)) for _ in range(5))
    return {"memory_gb_s": memory.numel() * 4 / read / 1e9, "import_torch_s": imports}


def start_again(name: str, args: argparse.Namespace) -> float:
    with start(name, args.folder, args.threads) as probe:
        return probe.ready_s


def measure_rows(args: argparse.Namespace, gemm: GemmPeak) -> None:
    """Only some rows, into a file that may have others."""
    path = RESULTS / "cpu" / f"{args.name}.json"
    before = json.loads(path.read_text())["results"] if path.exists() else {}
    with ExitStack() as stack:
        probes = [stack.enter_context(start(name, args.folder, args.threads)) for name in args.engines]
        found = measure(probes, args.repeats, gemm, args.rows)
    versions = {name: version(name, args.folder) for name in args.engines if name in PEERS}
    described = environment("torch", "transformers", "quire") | {"peers": versions, "rows_of_this_run": args.rows}
    print(write_report(path, described, before | found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="where the peers' environments lie")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--http-repeats", type=int, default=2, help="rounds over HTTP; 0 leaves them out")
    parser.add_argument("--name", default="peers", help="the files written are NAME.json and NAME.svg")
    parser.add_argument("--rows", nargs="+", choices=("decode", "ttft", "prefill", "batch"))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    compile_as_installed()
    gemm = GemmPeak(args.threads)
    if args.rows is not None:
        measure_rows(args, gemm)
        return
    gemm.measure()
    limits = other_limits(args.threads)
    try:
        with ExitStack() as stack:
            probes = [stack.enter_context(start(name, args.folder, args.threads)) for name in args.engines]
            results = measure(probes, args.repeats, gemm)
        for name, first in results["ready"].items():
            again = [start_again(name, args) for _ in range(args.repeats - 1) if first < SLOW_START_S]
            results["ready"][name] = min([first, *again])
    except ProbeError as error:
        raise SystemExit(str(error)) from error
    limits |= {"gemm_gflop_s": max(gemm.best), "gemm_sustained_gflop_s": max(gemm.sustained)}
    print({name: round(value, 1) for name, value in limits.items()})
    versions = {name: version(name, args.folder) for name in args.engines if name in PEERS}
    described = environment("torch", "transformers", "quire") | {
        "peers": versions,
        "limits": limits,
        "gemm": {"best": gemm.best, "sustained": gemm.sustained},
    }
    path = write_report(RESULTS / "cpu" / f"{args.name}.json", described, results)
    if args.http_repeats:  # a server that fails takes nothing with it
        results |= measure_http(args.engines, args.folder, args.http_repeats)
        write_report(path, described, results)
    show(results, limits)
    picture = path.with_suffix(".svg")
    picture.write_text(draw(results), encoding="utf-8")
    print(f"written to {path} and {picture}")


if __name__ == "__main__":
    main()
