"""A small SVG writer: shapes, text, and panels with axes. The same drawing is always the same bytes.

Files stand alone: no script, no font and no address outside them. They follow the reader's light or dark setting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal
from xml.sax.saxutils import escape, quoteattr

Anchor = Literal["start", "middle", "end"]
Attributes = dict[str, float | str]

# Colours that keep apart for colour-blind eyes, on white and on black.
COLOURS = {"blue": "#3f78c9", "orange": "#d9822b", "green": "#2f9e7d", "red": "#cc4b5a", "grey": "#98a2ad"}

_STYLE = """
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;font-size:12px;fill:#3a424c}
.page{fill:#ffffff}.title{font-size:15px;font-weight:600;fill:#171b20}.head{font-weight:600;fill:#171b20}
.dim{fill:#6a737d}.grid{stroke:#e6e9ec;stroke-width:1}.axis{stroke:#aab2bb;stroke-width:1}
@media (prefers-color-scheme:dark){text{fill:#c3cad2}.page{fill:#15181c}.title,.head{fill:#f0f3f6}.dim{fill:#8d96a0}
.grid{stroke:#282d33}.axis{stroke:#59626c}}
"""


def number(value: float) -> str:
    """Two decimals are finer than a pixel, and keep the file stable and small."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


class Svg:
    """A page to draw on, from the top left."""

    def __init__(self, width: float, height: float, title: str, subtitle: str = "") -> None:
        self.width = width
        self.height = height
        self._title = title
        self._elements: list[str] = []
        self.text(24, 32, title, kind="title")
        if subtitle:
            self.text(24, 52, subtitle, kind="dim")

    def rect(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        size = {"width": max(width, 0.0), "height": max(height, 0.0)}
        self._add("rect", {"x": x, "y": y, **size, "fill": COLOURS[colour]})

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "axis") -> None:
        self._add("line", {"class": kind, "x1": x1, "y1": y1, "x2": x2, "y2": y2})

    def stroke(
        self, points: Sequence[tuple[float, float]], colour: str, *, dashed: bool = False, width: float = 2.0
    ) -> None:
        look: Attributes = {"fill": "none", "stroke": COLOURS[colour], "stroke-width": width}
        if dashed:
            look["stroke-dasharray"] = "6 4"
        self._add("polyline", {"points": _path(points), **look, "stroke-linejoin": "round"})

    def area(self, points: Sequence[tuple[float, float]], colour: str, opacity: float) -> None:
        self._add("polygon", {"points": _path(points), "fill": COLOURS[colour], "fill-opacity": opacity})

    def dot(self, x: float, y: float, colour: str, radius: float = 3.5) -> None:
        self._add("circle", {"cx": x, "cy": y, "r": radius, "fill": COLOURS[colour]})

    def text(
        self, x: float, y: float, text: str, *, anchor: Anchor = "start", kind: str = "", turned: bool = False
    ) -> None:
        attributes: Attributes = {"x": x, "y": y}
        if kind:
            attributes["class"] = kind
        if anchor != "start":
            attributes["text-anchor"] = anchor
        if turned:
            attributes["transform"] = f"rotate(-90 {number(x)} {number(y)})"
        self._add("text", attributes, escape(text))

    def legend(self, x: float, y: float, entries: Iterable[tuple[str, str]]) -> None:
        """Entries of (name, colour), side by side; `x` is the right edge."""
        for name, colour in reversed(list(entries)):
            x -= text_width(name)
            self.text(x, y, name)
            self.rect(x - 15, y - 9, 10, 10, colour)
            x -= 33

    def render(self) -> str:
        size = f'width="{number(self.width)}" height="{number(self.height)}"'
        box = f'viewBox="0 0 {number(self.width)} {number(self.height)}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} role="img">'
        page = '<rect class="page" x="0" y="0" width="100%" height="100%" rx="8"/>'
        name = f"<title>{escape(self._title)}</title>"
        return "\n".join([head, name, f"<style>{_STYLE}</style>", page, *self._elements, "</svg>", ""])

    def _add(self, tag: str, attributes: Attributes, content: str | None = None) -> None:
        pairs = " ".join(
            f"{name}={quoteattr(value if isinstance(value, str) else number(value))}"
            for name, value in attributes.items()
        )
        self._elements.append(f"<{tag} {pairs}/>" if content is None else f"<{tag} {pairs}>{content}</{tag}>")


def text_width(text: str) -> float:
    """Pixels that a text takes, nearly: fonts differ."""
    return sum(4.0 if letter in "fijlrt .,:1|" else 7.2 for letter in text)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{number(x)},{number(y)}" for x, y in points)


@dataclass(frozen=True)
class Scale:
    """From values to pixels, linear or logarithmic; values outside the range land on its ends."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        place: Callable[[float], float] = math.log if self.log else float
        value = min(max(value, self.low), self.high)
        share = (place(value) - place(self.low)) / (place(self.high) - place(self.low))
        return self.start + share * (self.end - self.start)


def nice_step(span: float, count: int) -> float:
    """The largest of 1, 2, 5 times a power of ten that divides `span` into at least `count` parts."""
    power = 10.0 ** math.floor(math.log10(span / count))
    return max(factor * power for factor in (1, 2, 5) if factor * power <= span / count * (1 + 1e-9))


def linear_ticks(low: float, high: float, count: int = 4, *, whole: bool = False) -> list[float]:
    """Round values that begin at or below `low` and end at or above `high`."""
    span = high - low
    size = max(abs(low), abs(high))
    if span <= max(size * 1e-6, 1e-9):  # as good as one value
        span = max(size, 1.0)
    step = nice_step(span, count)
    if whole:
        step = max(1.0, step)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 times powers of ten, from at or below `low` to at or above `high`."""
    ticks = [
        factor * 10.0**power
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 2)
        for factor in (1, 2, 5)
    ]
    first = max(tick for tick in ticks if tick <= low * (1 + 1e-9))
    last = min(tick for tick in ticks if tick >= high * (1 - 1e-9) and tick > first)
    return [tick for tick in ticks if first <= tick <= last]


def tick_text(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.6g}"


class Panel:
    """A plot area with axes, ticks and labels."""

    def __init__(
        self,
        svg: Svg,
        box: tuple[float, float, float, float],  # left, top, width, height of the plot itself
        x_ticks: Sequence[float],
        y_ticks: Sequence[float],
        *,
        title: str = "",
        note: str = "",
        x_label: str = "",
        y_label: str = "",
        log_y: bool = False,
        show_x_ticks: bool = True,
        show_y_text: Callable[[float], str] = tick_text,
    ) -> None:
        left, top, width, height = box
        self.svg = svg
        self.bottom = top + height
        self.x = Scale(x_ticks[0], x_ticks[-1], left, left + width)
        self.y = Scale(y_ticks[0], y_ticks[-1], self.bottom, top, log_y)
        for tick in y_ticks:
            svg.line(left, self.y(tick), left + width, self.y(tick), "grid")
            svg.text(left - 8, self.y(tick) + 4, show_y_text(tick), anchor="end", kind="dim")
        if show_x_ticks:
            for tick in x_ticks:
                svg.line(self.x(tick), self.bottom, self.x(tick), self.bottom + 4)
                svg.text(self.x(tick), self.bottom + 18, tick_text(tick), anchor="middle", kind="dim")
        svg.line(left, self.bottom, left + width, self.bottom)
        if title:
            svg.text(left, top - 12, title, kind="head")
        if note:
            svg.text(left + width, top - 12, note, anchor="end", kind="dim")
        if x_label:
            svg.text(left + width / 2, self.bottom + 38, x_label, anchor="middle")
        if y_label:
            svg.text(left - 48, top + height / 2, y_label, anchor="middle", turned=True)

    def at(self, x: float, y: float) -> tuple[float, float]:
        return self.x(x), self.y(y)
