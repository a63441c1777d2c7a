"""The rows of the comparison on CPUs: what each aims at, what the cores allow, the table and the picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from quire.bench.svg import Svg

Values = Mapping[str, float]  # engine -> value

# The default model: layers, weights of a layer, of its keys and values, and of the head, and bytes of them all.
LAYERS, LAYER_WEIGHTS, KV_WEIGHTS, HEAD_WEIGHTS, STORED_BYTES = 30, 3.54e6, 0.221e6, 28.3e6, 96e6
ATTENTION_WIDTH = 9 * 64  # query heads and their size
GEMM_SHARE = 0.8  # of the measured peak; a row bound by arithmetic that comes this near it counts as reached


@dataclass(frozen=True)
class Row:
    name: str
    title: str
    aim: Callable[[Values, Values], float | None]
    """What to reach, from the row's values and the limits; None if the peer it refers to was not measured."""
    floor: Callable[[Values], float] | None = None
    """The best value that the limits of the cores allow."""
    by_arithmetic: bool = False
    lower: bool = False


def times(factor: float, *peers: str, lower: bool = False) -> Callable[[Values, Values], float | None]:
    def aim(values: Values, limits: Values) -> float | None:
        found = [values[peer] for peer in peers if peer in values]
        return factor * (min(found) if lower else max(found)) if found else None

    return aim


def prompt_flop(tokens: int) -> float:
    """What the first token after a prompt needs: of the last layer only keys and values, but for the last token."""
    matmuls = tokens * (LAYERS - 1) * LAYER_WEIGHTS + (tokens - 1) * KV_WEIGHTS + LAYER_WEIGHTS + HEAD_WEIGHTS
    pairs = (LAYERS - 1) * tokens * (tokens + 1) / 2 + tokens  # of a query and a key
    return 2 * matmuls + 4 * ATTENTION_WIDTH * pairs


def token_flop(context: int) -> float:
    """What one more token needs, itself counted in the context."""
    return 2 * (LAYERS * LAYER_WEIGHTS + HEAD_WEIGHTS) + 4 * ATTENTION_WIDTH * LAYERS * context


def _prefill_seconds(tokens: int, limits: Values) -> float:
    return prompt_flop(tokens) / (limits["gemm_gflop_s"] * 1e9)


def _batch_rate(limits: Values) -> float:
    each = prompt_flop(128) + sum(token_flop(128 + made) for made in range(1, 128))
    return 128 / (each / (limits["gemm_gflop_s"] * 1e9))


ROWS = (
    Row(
        "decode",
        "single-stream decode, tok/s",
        times(1.5, "llama.cpp", "llama.cpp-f32"),
        lambda limits: limits["memory_gb_s"] * 1e9 / STORED_BYTES,
    ),
    Row(
        "ttft",
        "first token of a 128-token prompt, ms",
        times(0.75, "openvino", lower=True),
        lambda limits: 1e3 * _prefill_seconds(128, limits),
        by_arithmetic=True,
        lower=True,
    ),
    Row(
        "prefill",
        "prefill of 1,024 tokens, tok/s",
        times(1.25, "openvino"),
        lambda limits: 1024 / _prefill_seconds(1024, limits),
        by_arithmetic=True,
    ),
    Row("batch", "32 at once, 128 in / 128 out, tok/s", times(1.7, "openvino"), _batch_rate, by_arithmetic=True),
    Row("memory", "resident memory, one stream, MB", lambda values, limits: 600.0, lower=True),
    Row("memory_peak", "most memory, 32 at once, MB", lambda values, limits: None, lower=True),
    Row("ready", "import and load, s", lambda values, limits: limits["import_torch_s"] + 1.0, lower=True),
    Row("http_rate", "HTTP, 16 streams, 128 in / 64 out, tok/s", times(1.7, "vllm")),
    Row("http_ttft", "the same, median TTFT, s", times(0.6, "vllm", lower=True), lower=True),
)


def share_of_limit(row: Row, values: Values, limits: Values) -> float | None:
    """How near Quire comes to what the cores allow: 1 is as fast as they can."""
    if row.floor is None or "quire" not in values:
        return None
    best, reached = row.floor(limits), values["quire"]
    return best / reached if row.lower else reached / best


def is_reached(row: Row, values: Values, limits: Values) -> bool | None:
    aim = row.aim(values, limits)
    if "quire" not in values:
        return None
    share = share_of_limit(row, values, limits)
    if row.by_arithmetic and share is not None and share >= GEMM_SHARE:
        return True
    if aim is None:
        return None
    return values["quire"] <= aim if row.lower else values["quire"] >= aim


def show(results: Mapping[str, Values], limits: Values) -> None:
    engines = list(dict.fromkeys(name for values in results.values() for name in values))
    table = Table(
        "", *engines, "aim", "limit", "of it", "reached", title="Quire beside its peers on this machine's CPU"
    )
    for row in ROWS:
        values = results.get(row.name)
        if not values:
            continue
        aim, reached = row.aim(values, limits), is_reached(row, values, limits)
        floor = f"{row.floor(limits):,.1f}" if row.floor else "-"
        share = share_of_limit(row, values, limits)
        cells = [f"{values[name]:,.1f}" if name in values else "-" for name in engines]
        near = "-" if share is None else f"{share:.0%}"
        verdict = "?" if reached is None else "yes" if reached else "NO"
        table.add_row(row.title, *cells, "-" if aim is None else f"{aim:,.1f}", floor, near, verdict)
    Console(width=160).print(table)


def draw(results: Mapping[str, Values]) -> str:
    """Bars per row and engine, each row scaled to its largest value."""
    rows = [row for row in ROWS if results.get(row.name)]
    height = 84 + sum(34 + 18 * len(results[row.name]) for row in rows)
    svg = Svg(760, height, "Quire beside its peers", "SmolLM2-135M on the same cores, best of each in one run")
    y = 84.0
    for row in rows:
        values = results[row.name]
        svg.text(24, y, f"{row.title} ({'less' if row.lower else 'more'} is better)", kind="head")
        largest = max(values.values())
        for name, value in values.items():
            y += 18
            svg.text(120, y + 9, name, anchor="end")
            width = 520 * value / largest
            svg.rect(128, y, width, 12, "blue" if name == "quire" else "grey")
            svg.text(134 + width, y + 10, f"{value:,.1f}", kind="dim")
        y += 34
    return svg.render()
