"""The pictures of a benchmark: latency over throughput, requests over time, lengths of prompts and answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire.bench.records import RequestRecord, in_flight
from quire.bench.stats import Distribution, Summary, distribution
from quire.bench.svg import Panel, Svg, linear_ticks, log_ticks

WIDTH = 920.0
LOG_FROM = 25.0  # ratio of the largest to the smallest latency from which a linear axis hides the small ones
NUM_BINS = 24


@dataclass(frozen=True)
class CurvePoint:
    """One load: what it is called, and what was measured under it."""

    label: str
    summary: Summary


def latency_curve(points: Sequence[CurvePoint], title: str, subtitle: str = "") -> str:
    """TTFT and TPOT over output throughput, one point per load, as an SVG file's text."""
    svg = Svg(WIDTH, 400, title, subtitle)
    limits: Mapping[str, float] = next((p.summary.goodput.limits_ms for p in points if p.summary.goodput), {})
    svg.legend(WIDTH - 24, 32, [("p50", "blue"), ("p99", "orange"), *([("limit", "red")] if limits else [])])
    for column, (field, metric, name) in enumerate(
        (("ttft_ms", "ttft", "Time to first token, ms"), ("tpot_ms", "tpot", "Time per output token, ms"))
    ):
        measured = [
            (point.label, point.summary.output_tokens_per_s, found)
            for point in points
            if (found := getattr(point.summary, field)) is not None
        ]
        box = (72 + column * (WIDTH / 2), 104.0, WIDTH / 2 - 108, 234.0)
        _curve_panel(svg, box, name, measured, limits.get(metric))
    return svg.render()


def _curve_panel(
    svg: Svg,
    box: tuple[float, float, float, float],
    title: str,
    measured: Sequence[tuple[str, float, Distribution]],
    limit: float | None,
) -> None:
    values = [value for _, _, found in measured for value in (found.p50, found.p99)] + ([limit] if limit else [])
    low, high = min(values, default=1.0), max(values, default=1.0)
    log = low > 0 and high / low >= LOG_FROM
    y_ticks = log_ticks(low, high) if log else linear_ticks(0, high)
    x_ticks = linear_ticks(0, max((x for _, x, _ in measured), default=1.0))
    panel = Panel(svg, box, x_ticks, y_ticks, title=title, x_label="output tokens/s", log_y=log)
    if limit:
        svg.stroke([panel.at(x_ticks[0], limit), panel.at(x_ticks[-1], limit)], "red", dashed=True, width=1.5)
    for percent, colour in (("p99", "orange"), ("p50", "blue")):
        places = [panel.at(x, getattr(found, percent)) for _, x, found in measured]
        svg.stroke(places, colour)
        for x, y in places:
            svg.dot(x, y, colour)
    taken: list[tuple[float, float]] = []
    for label, throughput, found in measured:
        x, y = panel.at(throughput, found.p50)
        # Points at saturation lie close together; a label that would cover another is left out.
        if all(abs(x - other_x) > 18 or abs(y - other_y) > 13 for other_x, other_y in taken):
            svg.text(x + 7, y + 14, label, kind="dim")
            taken.append((x, y))


def timeline(records: Sequence[RequestRecord], title: str, subtitle: str = "") -> str:
    """Every request as a bar from when it was due to its end, under the number of requests in flight."""
    rows = sorted(records, key=lambda record: (record.due, record.index))
    height = min(max(len(rows) * 7.0, 140.0), 620.0)
    svg = Svg(WIDTH, height + 294, title, subtitle)
    svg.legend(
        WIDTH - 24,
        32,
        [("waits here", "grey"), ("to first token", "orange"), ("answer", "blue"), ("failed", "red")],
    )
    x_ticks = linear_ticks(0, max((record.end for record in rows), default=1.0) or 1.0, 6)
    _flight_panel(svg, list(rows), x_ticks)
    row_ticks = linear_ticks(0, max(len(rows), 1), whole=True)
    panel = Panel(
        svg,
        (72, 228, WIDTH - 108, height),
        x_ticks,
        [-tick for tick in reversed(row_ticks)],
        x_label="seconds since the start",
        title="Requests, in the order in which they were due",
        show_y_text=lambda tick: f"{-tick:.0f}",
    )
    thickness = height / row_ticks[-1]
    for row, record in enumerate(rows):
        y = panel.y(-row) + thickness * 0.12
        for begin, end, colour in spans(record):
            svg.rect(panel.x(begin), y, max(panel.x(end) - panel.x(begin), 0.75), thickness * 0.76, colour)
    return svg.render()


def spans(record: RequestRecord) -> list[tuple[float, float, str]]:
    """(begin, end, colour) of the parts of a request's bar."""
    parts = [(record.due, record.start, "grey")] if record.start > record.due else []
    if record.error is not None:
        return [*parts, (record.start, record.end, "red")]
    if record.first_token is None:
        return [*parts, (record.start, record.end, "orange")]
    return [*parts, (record.start, record.first_token, "orange"), (record.first_token, record.end, "blue")]


def _flight_panel(svg: Svg, records: list[RequestRecord], x_ticks: Sequence[float]) -> None:
    changes = in_flight(records)
    y_ticks = linear_ticks(0, max((count for _, count in changes), default=1), 1, whole=True)
    panel = Panel(svg, (72, 100, WIDTH - 108, 80), x_ticks, y_ticks, title="In flight", show_x_ticks=False)
    outline: list[tuple[float, float]] = []
    before = 0
    for time, count in changes:
        outline += [panel.at(time, before), panel.at(time, count)]
        before = count
    if outline:
        svg.area(outline, "blue", 0.18)
        svg.stroke(outline, "blue", width=1.5)


def lengths(records: Sequence[RequestRecord], title: str, subtitle: str = "") -> str:
    """How long prompts and answers were, in tokens, as two histograms."""
    done = [record for record in records if record.error is None]
    svg = Svg(WIDTH, 360, title, subtitle)
    sides = (
        ("Prompt tokens", "green", [record.prompt_tokens for record in done]),
        ("Output tokens", "blue", [record.output_tokens for record in done]),
    )
    for column, (name, colour, values) in enumerate(sides):
        box = (72 + column * (WIDTH / 2), 104.0, WIDTH / 2 - 108, 194.0)
        _histogram(svg, box, name, colour, values)
    return svg.render()


def _histogram(
    svg: Svg, box: tuple[float, float, float, float], name: str, colour: str, values: Sequence[int]
) -> None:
    found = distribution(map(float, values))
    note = "none" if found is None else f"mean {found.mean:,.1f}, p50 {found.p50:,.0f}, p99 {found.p99:,.0f}"
    low, high = (min(values), max(values)) if values else (0, 1)
    width = -(-(high - low + 1) // NUM_BINS)  # whole tokens per bin, so that no bin is wider than its neighbour
    first = low - width if low >= width else 0
    counts = [0] * ((high - first) // width + 2)
    for value in values:
        counts[(value - first) // width] += 1
    x_ticks = linear_ticks(first, first + len(counts) * width, whole=True)
    y_ticks = linear_ticks(0, max(counts), whole=True)
    panel = Panel(svg, box, x_ticks, y_ticks, title=name, note=note, x_label="tokens", y_label="requests")
    for index, count in enumerate(counts):
        if count:
            begin = first + index * width - 0.5  # a bar stands over its values, not beside them
            left, right = panel.x(begin), panel.x(begin + width)
            bar = max(right - left - 1, 1.0)
            svg.rect(left + 0.5, panel.y(count), bar, panel.bottom - panel.y(count), colour)
