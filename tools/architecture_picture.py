"""Draws docs/images/architecture.svg from the description below; tools/gen_docs.py writes the file and checks it.

A band is a process or a part of one, a box is a package of quire/ with what it does in a few words, an arrow is a
type that crosses from one band to the next.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.bench.svg import Svg

WIDTH, MARGIN, PAD, GAP = 760.0, 24.0, 16.0, 12.0
TOP, HEAD, BOX, BETWEEN = 76.0, 30.0, 52.0, 54.0


@dataclass(frozen=True)
class Band:
    title: str
    note: str
    colour: str
    rows: tuple[tuple[tuple[str, str], ...], ...]  # rows of (package, what it does)

    @property
    def height(self) -> float:
        return HEAD + len(self.rows) * (BOX + GAP) + 4


@dataclass(frozen=True)
class Crossing:
    """What passes between two bands: a type downwards, a type upwards, and how."""

    down: str
    up: str
    how: str


BANDS = (
    Band(
        "Frontend",
        "knows text, no tensors",
        "blue",
        (
            (
                ("server", "HTTP, three APIs"),
                ("cli", "commands"),
                ("bench", "measurements"),
                ("replay", "traces, plans"),
            ),
            (
                ("frontend", "templates, tokenizer, LLM"),
                ("parsers", "tool calls, reasoning"),
            ),
        ),
    ),
    Band(
        "Engine",
        "knows tokens, no text",
        "orange",
        (
            (
                ("engine", "the loop, the step"),
                ("sched", "who runs in a step"),
                ("kv", "blocks, prefixes"),
                ("structured", "grammars, masks"),
            ),
        ),
    ),
    Band(
        "Worker",
        "knows tensors, not who asked",
        "green",
        (
            (
                ("worker", "loading, ranks"),
                ("planning", "settings, memory"),
                ("runner", "one step; sampling"),
                ("loader", "checkpoints"),
            ),
            (("models", "one small file each"), ("layers", "weights, quantization"), ("attention", "KV layouts")),
            (("ops", "torch references"), ("kernels", "C++ and Triton"), ("platform", "CPU, CUDA")),
        ),
    ),
)
CROSSINGS = (
    Crossing("EngineRequest", "EngineOutputs", "EngineClient: a call, or messages to a process"),
    Crossing("StepPlan", "StepResult", "the executor: a future per step, several steps in flight"),
)


def draw() -> str:
    height = TOP + sum(band.height for band in BANDS) + BETWEEN * len(CROSSINGS) + MARGIN
    svg = Svg(WIDTH, height, "Quire: from a request to a kernel", "boxes are packages; imports go downwards")
    y = TOP
    for index, band in enumerate(BANDS):
        _draw_band(svg, band, y)
        y += band.height
        if index < len(CROSSINGS):
            _draw_crossing(svg, CROSSINGS[index], y)
            y += BETWEEN
    return svg.render()


def _draw_band(svg: Svg, band: Band, top: float) -> None:
    _frame(svg, MARGIN, top, WIDTH - 2 * MARGIN, band.height, band.colour, 0.08)
    svg.text(MARGIN + PAD, top + 20, band.title, kind="head")
    svg.text(WIDTH - MARGIN - PAD, top + 20, band.note, anchor="end", kind="dim")
    for index, row in enumerate(band.rows):
        y = top + HEAD + index * (BOX + GAP)
        width = (WIDTH - 2 * (MARGIN + PAD) - GAP * (len(row) - 1)) / len(row)
        for column, (package, words) in enumerate(row):
            x = MARGIN + PAD + column * (width + GAP)
            _frame(svg, x, y, width, BOX, band.colour, 0.16)
            svg.text(x + 12, y + 21, package, kind="head")
            svg.text(x + 12, y + 39, words)


def _draw_crossing(svg: Svg, crossing: Crossing, top: float) -> None:
    down, up, middle = MARGIN + 60, WIDTH - MARGIN - 60, top + BETWEEN / 2 + 4
    _arrow(svg, down, top + 6, top + BETWEEN - 6)
    _arrow(svg, up, top + BETWEEN - 6, top + 6)
    svg.text(down + 12, middle, crossing.down, kind="head")
    svg.text(up - 12, middle, crossing.up, anchor="end", kind="head")
    svg.text(WIDTH / 2, middle, crossing.how, anchor="middle", kind="dim")


def _frame(svg: Svg, x: float, y: float, width: float, height: float, colour: str, opacity: float) -> None:
    corners = [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]
    svg.area(corners, colour, opacity)
    svg.stroke([*corners, corners[0]], colour, width=1.0)


def _arrow(svg: Svg, x: float, start: float, end: float) -> None:
    back = -7.0 if end > start else 7.0
    svg.stroke([(x, start), (x, end + back)], "grey")
    svg.area([(x, end), (x - 5, end + back), (x + 5, end + back)], "grey", 1.0)
