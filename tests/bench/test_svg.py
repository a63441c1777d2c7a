"""The drawing: well-formed, stable, and everything inside the page, whatever the values."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.bench.svg import Panel, Scale, Svg, linear_ticks, log_ticks, nice_step, number, tick_text

POSITIVE = st.floats(1e-6, 1e9)


@pytest.mark.parametrize(
    ("value", "text"), [(1.0, "1"), (0.126, "0.13"), (-0.001, "0"), (12.5, "12.5"), (100, "100")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (0.25, "0.25"), (1500, "1,500"), (0.30000000000000004, "0.3")])
def test_ticks_are_readable(value: float, text: str) -> None:
    assert tick_text(value) == text


@pytest.mark.parametrize(("span", "count", "step"), [(10, 5, 2), (9, 4, 2), (100, 4, 20), (0.3, 3, 0.1), (7, 1, 5)])
def test_steps_are_1_2_or_5(span: float, count: int, step: float) -> None:
    assert nice_step(span, count) == pytest.approx(step)


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6), st.integers(1, 8), st.booleans())
def test_linear_ticks_cover_the_values_and_are_few(low: float, span: float, count: int, whole: bool) -> None:
    ticks = linear_ticks(low, low + span, count, whole=whole)
    slack = 1e-6 * max(abs(low), span, 1)
    assert ticks[0] <= low + slack
    assert ticks[-1] >= low + span - slack
    assert 2 <= len(ticks) <= 5 * count + 3
    assert all(first < second for first, second in pairwise(ticks))


@given(POSITIVE, st.floats(1, 1e6))
def test_log_ticks_cover_the_values(low: float, ratio: float) -> None:
    ticks = log_ticks(low, low * ratio)
    assert ticks[0] <= low * (1 + 1e-6)
    assert ticks[-1] >= low * ratio * (1 - 1e-6)
    assert all(first < second for first, second in pairwise(ticks))


@given(POSITIVE, st.floats(1.01, 1e6), st.booleans(), st.floats(-1e9, 1e9))
def test_scales_map_the_ends_and_stay_between(low: float, ratio: float, log: bool, value: float) -> None:
    scale = Scale(low, low * ratio, 10, 110, log)
    assert (scale(low), scale(low * ratio)) == (pytest.approx(10), pytest.approx(110))
    assert 10 - 1e-6 <= scale(value) <= 110 + 1e-6


def test_any_text_is_escaped_and_the_file_stands_alone() -> None:
    svg = Svg(200, 100, 'a < b & "c"', "x > y")
    panel = Panel(svg, (50, 20, 100, 50), [0, 1], [0, 1], title="<t>", x_label="&", y_label="'", note="]]>")
    svg.dot(*panel.at(0.5, 0.5), "blue")
    text = svg.render()
    root = ElementTree.fromstring(text)
    assert root.find("{http://www.w3.org/2000/svg}title").text == 'a < b & "c"'  # type: ignore[union-attr]
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "script" not in text
