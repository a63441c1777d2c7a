"""Quire beside its peers on the same weights and cores, in one run, taking turns; the best of each counts.

    python benchmarks/cpu_peers.py [--folder ~/.cache/quire-peers] [--engines quire llama.cpp ...] [--repeats 3]

Every engine is loaded once, in an environment of its own, and stopped (SIGSTOP) while another one is measured. Prints
a table with each row's aim and whether it is reached, and writes JSON and a picture to results/cpu/. The rows over
HTTP are measured by the client of benchmarks/server_peers.py, a server at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cpu_peers_report import ROWS, draw, show
from peers import DEFAULT_FOLDER, HERE, PEERS, SERVERS, convert_to_hf, install, prepare_model, stop, version
from report import RESULTS, environment
from server_peers import best_of, measure_peer

from quire.bench.report import write_report
from quire.loader.hub import resolve_model

ENGINES = ("quire", "llama.cpp", "llama.cpp-f32", "openvino", "vllm", "transformers")
LOWEST_TOKEN, HIGHEST_TOKEN = 100, 40_000
HTTP_PROMPTS = 64


@dataclass
class Probe:
    """A loaded engine that answers over pipes; see cpu_probe.py."""

    name: str
    process: subprocess.Popen[str]
    ready_s: float = 0.0
    peak_mb: float = 0.0

    def generate(self, prompts: list[list[int]], outputs: int) -> float:
        os.killpg(self.process.pid, signal.SIGCONT)
        self._send({"prompts": prompts, "outputs": outputs})
        seconds: float = self.receive()["seconds"]
        self.peak_mb = max(self.peak_mb, resident_mb(self.process.pid))
        os.killpg(self.process.pid, signal.SIGSTOP)
        return seconds

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended; see its log")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _send(self, job: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()


@contextmanager
def loaded(name: str, folder: Path, threads: int) -> Iterator[Probe]:
    """An engine that has said that it is ready, and is stopped until it is asked."""
    engine = name.removesuffix("-f32")
    python = install(engine, folder) if engine in PEERS else Path(sys.executable)
    extra = PEERS[engine].environment if engine in PEERS else {}
    argv = [str(python), str(HERE / "cpu_probe.py"), engine, model_for(name, folder), str(threads)]
    with (folder / f"{name}-probe.log").open("wb") as log:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | extra | {"OMP_NUM_THREADS": str(threads)},
            start_new_session=True,
        )
        try:
            probe = Probe(name, process)
            probe.ready_s = probe.receive()["ready_s"]
            os.killpg(process.pid, signal.SIGSTOP)
            print(f"{name}: ready after {probe.ready_s:.1f} s")
            yield probe
        finally:
            os.killpg(process.pid, signal.SIGCONT)
            stop(process)


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
    return prepare_model(name, folder)


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


def measure(probes: list[Probe], repeats: int) -> dict[str, dict[str, float]]:
    """row -> engine -> best value. Fresh prompts every time: nothing is served from a cache."""
    draw_ids = random.Random(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[draw_ids.randint(LOWEST_TOKEN, HIGHEST_TOKEN) for _ in range(length)] for _ in range(count)]

    def decode(probe: Probe) -> float:
        first = probe.generate(prompts(1, 128), 1)
        return 127 / (probe.generate(prompts(1, 128), 128) - first)

    rows: dict[str, Callable[[Probe], float]] = {
        "decode": decode,
        "ttft": lambda probe: 1e3 * probe.generate(prompts(1, 128), 1),
        "prefill": lambda probe: 1024 / probe.generate(prompts(1, 1024), 1),
        "batch": lambda probe: 32 * 128 / probe.generate(prompts(32, 128), 128),
    }
    lower_is_better = {row.name for row in ROWS if row.lower}
    results: dict[str, dict[str, float]] = {}
    for probe in probes:
        probe.generate(prompts(1, 128), 8)  # whatever an engine does only once
    for row, run in rows.items():
        best: dict[str, float] = {}
        for _ in range(repeats):
            for probe in probes:
                value = run(probe)
                pick = min if row in lower_is_better else max
                best[probe.name] = pick(best.get(probe.name, value), value)
        results[row] = best
        if row == "decode":
            results["memory"] = {probe.name: probe.peak_mb for probe in probes}
        print(row, {name: round(value, 1) for name, value in best.items()})
    results["memory_peak"] = {probe.name: probe.peak_mb for probe in probes}
    results["ready"] = {probe.name: probe.ready_s for probe in probes}
    return results


def measure_http(engines: list[str], folder: Path, repeats: int) -> dict[str, dict[str, float]]:
    """The two rows over HTTP, of the engines that have a server."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in engines if name in SERVERS}
    for repeat in range(repeats):
        for name, found in runs.items():
            found.append(measure_peer(name, folder, num_prompts=HTTP_PROMPTS, seed=repeat))
    best = {name: best_of(found) for name, found in runs.items()}
    return {
        "http_rate": {name: run["output_tokens_per_s"] for name, run in best.items()},
        "http_ttft": {name: run["ttft_ms"]["p50"] / 1000 for name, run in best.items()},
    }


def resident_mb(session: int) -> float:
    """Memory of all processes of a session; pages they share count once."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[3]) == session:
                rollup = (stat.parent / "smaps_rollup").read_text()
                total += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total / 1024


def limits(threads: int, repeats: int = 30) -> dict[str, float]:
    """What the cores can do, measured now: reading memory, and a float32 product of torch's library."""
    torch.set_num_threads(threads)
    memory, a, b = torch.ones(1 << 28), torch.randn(1536, 1536), torch.randn(1536, 1536)
    read = min(_seconds(memory.sum) for _ in range(repeats))
    product = min(_seconds(lambda: a @ b) for _ in range(repeats))
    start = [sys.executable, "-c", "import torch"]
    imports = min(_seconds(lambda: subprocess.run(start, check=True)) for _ in range(5))
    return {
        "memory_gb_s": memory.numel() * 4 / read / 1e9,
        "gemm_gflop_s": 2 * 1536**3 / product / 1e9,
        "import_torch_s": imports,
    }


def _seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="where the peers' environments lie")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--http-repeats", type=int, default=2, help="rounds over HTTP; 0 leaves them out")
    parser.add_argument("--name", default="peers", help="the files written are NAME.json and NAME.svg")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    measured_limits = limits(args.threads)
    print({name: round(value, 1) for name, value in measured_limits.items()})
    with ExitStack() as stack:
        probes = [stack.enter_context(loaded(name, args.folder, args.threads)) for name in args.engines]
        results = measure(probes, args.repeats)
    if args.http_repeats:
        results |= measure_http(args.engines, args.folder, args.http_repeats)
    versions = {name: version(name, args.folder) for name in args.engines if name in PEERS}
    described = environment("torch", "transformers", "quire") | {"peers": versions, "limits": measured_limits}
    path = write_report(RESULTS / "cpu" / f"{args.name}.json", described, results)
    show(results, measured_limits)
    picture = path.with_suffix(".svg")
    picture.write_text(draw(results), encoding="utf-8")
    print(f"written to {path} and {picture}")


if __name__ == "__main__":
    main()
