"""docs/results.md prints the figures of the result files, each with its commit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
GPU_ROWS = (
    "decode batch 1, ms",
    "decode batch 64, tok/s",
    "decode batch 256, tok/s",
    "prefill 8k, ms",
    "TTFT 32 tokens, ms",
    "8k prefix hit, ms",
    "512 x (512 in, 256 out), tok/s",
    "256 mixed, tok/s",
    "start, warm caches, s",
    "start, empty caches, s",
)
CPU_ROWS = ("decode", "ttft", "prefill", "batch", "memory", "ready")


def results(name: str) -> Any:
    report = json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))
    assert f"ommit {report['environment']['commit'][:7]}, " in PAGE, f"the page is of another run than {name}"
    return report["results"]


def rows(heading: str) -> list[list[float | None]]:
    """The numbers of the first table under a heading, without its head and its first column."""
    table = PAGE.partition(f"## {heading}")[2].partition("\n## ")[0]
    lines = re.search(r"(?:^\|.*\|\n)+", table, flags=re.M)[0].splitlines()[2:]
    cells = [line.strip("|").split("|")[1:] for line in lines]
    return [[float(c.replace(",", "")) if re.search(r"\d", c) else None for c in row] for row in cells]


def shown_as(value: float, shown: float | None) -> bool:
    """Whether a figure is the value, rounded to as many digits as it has."""
    assert shown is not None
    return abs(value - shown) <= max(0.006 * value, 0.05)


def test_the_gpus_figures() -> None:
    found = results("h200/table.json")
    table = rows("One NVIDIA H200")
    assert len(table) == len(GPU_ROWS)
    for name, shown in zip(GPU_ROWS, table, strict=True):
        for column, model in ((0, "qwen3-0.6b"), (2, "llama-8b")):
            if name in found[model]:
                assert shown_as(found[model][name], shown[column]), (model, name)


def test_the_cpus_figures() -> None:
    found = results("cpu/peers.json")
    for name, shown in zip(CPU_ROWS, rows("Two CPU cores"), strict=True):
        for column, engine in enumerate(("quire", "llama.cpp", "openvino")):
            assert shown_as(found[name][engine], shown[column]), (name, engine)


def test_the_servers_figures() -> None:
    found = results("server_peers.json")
    throughput, first_token = rows("Over HTTP")
    for column, server in enumerate(("quire", "vllm", "llama.cpp")):
        best = found[server]["best"]
        assert shown_as(best["output_tokens_per_s"], throughput[column])
        assert shown_as(best["ttft_ms"]["p50"] / 1000, first_token[column])
