"""The picture and the table of a capacity plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.bench.svg import Panel, Svg, linear_ticks
from quire.bench.tables import Grid
from quire.replay.capacity import Capacity

_WIDTH = 960


def capacity_grid(results: Sequence[Capacity]) -> Grid:
    """A column for each setting."""
    measures: list[tuple[str, Callable[[Capacity], str]]] = [
        ("output tokens/s", lambda c: f"{c.output_tokens_per_s:.1f}"),
        ("requests/s", lambda c: f"{c.requests_per_s:.2f}"),
        ("TTFT p50 / p90 / p99, ms", lambda c: _three(c.ttft_ms, "{:.0f}")),
        ("ITL p50 / p90 / p99, ms", lambda c: _three(c.itl_ms, "{:.1f}")),
        ("E2E p99, s", lambda c: f"{c.e2e_ms['p99'] / 1000:.1f}" if c.e2e_ms else "-"),
        ("completed, refused", lambda c: f"{c.completed}, {c.refused}"),
        ("most running at once", lambda c: str(c.peak_running)),
        ("KV blocks in use, mean and peak", lambda c: f"{c.mean_kv_use:.0%}, {c.peak_kv_use:.0%}"),
        ("preemptions", lambda c: str(c.preemptions)),
        ("prefix hits", lambda c: f"{c.prefix_hit_rate:.0%}"),
        ("device busy", lambda c: f"{c.device_busy:.0%}"),
    ]
    if any(result.cost_per_million is not None for result in results):
        measures.append(("cost of a million tokens", lambda c: f"{c.cost_per_million or 0.0:.3f}"))
    rows = [[name, *(shown(result) for result in results)] for name, shown in measures]
    return Grid(["settings", *map(_settings, results)], list(rows))


def capacity_picture(results: Sequence[Capacity], title: str, subtitle: str = "") -> str:
    """An SVG file's text: for each setting its p50 and p99 of TTFT and ITL; below, the first one over time."""
    svg = Svg(_WIDTH, 640, title, subtitle)
    svg.legend(_WIDTH - 24, 32, [("p50", "blue"), ("p99", "orange")])
    for column, (name, field) in enumerate(
        (("Time to first token, ms", "ttft_ms"), ("Between tokens, ms", "itl_ms"))
    ):
        _bars(svg, (72 + column * _WIDTH / 2, 104.0, _WIDTH / 2 - 108, 180.0), name, field, results)
    _timeline(svg, results[0])
    return svg.render()


def _bars(
    svg: Svg, box: tuple[float, float, float, float], title: str, field: str, results: Sequence[Capacity]
) -> None:
    values = [getattr(result, field) for result in results]
    highest = max((value.get("p99", 0.0) for value in values), default=1.0)
    panel = Panel(svg, box, [0, len(results)], linear_ticks(0, highest or 1.0), title=title, show_x_ticks=False)
    for index, (result, value) in enumerate(zip(results, values, strict=True)):
        for offset, percent, colour in ((0.18, "p50", "blue"), (0.5, "p99", "orange")):
            x, y = panel.at(index + offset, value.get(percent, 0.0))
            width = panel.x(index + offset + 0.3) - x
            svg.rect(x, y, width, panel.bottom - y, colour)
        svg.text(panel.x(index + 0.5), panel.bottom + 18, _settings(result), anchor="middle", kind="dim")


def _timeline(svg: Svg, result: Capacity) -> None:
    points = result.timeline
    if len(points) < 2:
        return
    box = (72.0, 380.0, _WIDTH - 132.0, 190.0)
    most = max(max(running + waiting for _, running, waiting, _ in points), 1)
    panel = Panel(
        svg,
        box,
        linear_ticks(0, points[-1][0]),
        linear_ticks(0, most, whole=True),
        title="Requests that run, requests in the engine, and KV blocks in use",
        x_label="seconds",
    )
    svg.stroke([panel.at(at, running + waiting) for at, running, waiting, _ in points], "orange")
    svg.stroke([panel.at(at, running) for at, running, _, _ in points], "blue")
    svg.stroke([panel.at(at, use * most) for at, _, _, use in points], "green", dashed=True)
    entries = [("running", "blue"), ("with those that wait", "orange"), ("KV use of all", "green")]
    svg.legend(_WIDTH - 60, 368, entries)


def _settings(result: Capacity) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in result.settings.items()) or "as they are"


def _three(values: dict[str, float], form: str) -> str:
    return " / ".join(form.format(values[name]) for name in ("p50", "p90", "p99")) if values else "-"
