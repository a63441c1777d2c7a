"""Draws the GPU table beside vLLM's figures, for docs/guides/gpu.md.

python benchmarks/gpu_picture.py [--table benchmarks/results/h200/table.json] [--out docs/images/gpu-vs-vllm.svg]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from gpu import TABLE, is_time
from report import RESULTS

from quire.bench.svg import Svg, linear_ticks, tick_text

IMAGE = Path(__file__).parents[1] / "docs" / "images" / "gpu-vs-vllm.svg"
WIDTH, LEFT, RIGHT, TOP, LINE = 760.0, 200.0, 150.0, 96.0, 22.0
COLOURS = {"qwen3-0.6b": "blue", "llama-8b": "green"}
LEFT_OUT = "start, "  # so much faster that the other bars would be dots


def draw(results: dict[str, dict[str, float]], commit: str) -> str:
    """A bar for each row: how many times as fast as vLLM."""
    bars = []
    for (model, row), (vllm, _, _) in TABLE.items():
        value = results.get(model, {}).get(row)
        if value is not None and vllm is not None and not row.startswith(LEFT_OUT):
            bars.append((model, row, value, vllm / value if is_time(row) else value / vllm))
    height = TOP + LINE * len(bars) + 48
    svg = Svg(WIDTH, height, "One H200: times as fast as vLLM 0.24", f"bf16 but for fp8; greedy; commit {commit}")
    svg.legend(WIDTH - 24, 32, COLOURS.items())
    ticks = linear_ticks(0.0, max(speed for *_, speed in bars))
    scale = (WIDTH - LEFT - RIGHT) / ticks[-1]
    for tick in ticks:
        x = LEFT + tick * scale
        svg.line(x, TOP - 10, x, height - 44, "grid")
        svg.text(x, height - 26, "vLLM" if tick == 1 else tick_text(tick), anchor="middle", kind="dim")
    for index, (model, row, value, speed) in enumerate(bars):
        y = TOP + LINE * index
        name, _, unit = row.rpartition(", ")
        svg.text(LEFT - 10, y + 10, name, anchor="end")
        svg.rect(LEFT, y, speed * scale, LINE * 0.6, COLOURS[model])
        shown = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
        svg.text(LEFT + speed * scale + 8, y + 10, f"{speed:.2f}  ({shown} {unit})", kind="dim")
    svg.line(LEFT + scale, TOP - 10, LEFT + scale, height - 44)
    return svg.render()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, default=RESULTS / "h200" / "table.json")
    parser.add_argument("--out", type=Path, default=IMAGE)
    args = parser.parse_args()
    table = json.loads(args.table.read_text(encoding="utf-8"))
    args.out.write_text(draw(table["results"], table["environment"]["commit"][:7]), encoding="utf-8")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
