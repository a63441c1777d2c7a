"""The pictures show what was measured, for any records, and are the same bytes every time."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.bench.charts import CurvePoint, latency_curve, lengths, spans, timeline
from quire.bench.records import RequestRecord
from quire.bench.stats import summarize
from tests.bench.helpers import record

NAMESPACE = "{http://www.w3.org/2000/svg}"


@st.composite
def any_record(draw: st.DrawFn) -> RequestRecord:
    due = draw(st.floats(0, 100))
    start = due + draw(st.floats(0, 10))
    error = draw(st.sampled_from([None, None, "timeout"]))
    tokens = draw(st.integers(0, 5000))
    first = start + draw(st.floats(0, 50)) if tokens else None
    end = (first or start) + draw(st.floats(0, 50))
    return RequestRecord(
        index=draw(st.integers(0, 9)),
        due=due,
        start=start,
        first_token=first,
        last_token=end if tokens else None,
        end=end,
        prompt_tokens=draw(st.integers(0, 100_000)),
        output_tokens=tokens,
        error=error,
    )


def check(text: str) -> ElementTree.Element:
    """Well-formed, with no shape outside the page and no number that is none."""
    root = ElementTree.fromstring(text)
    limits = {"x": float(root.attrib["width"]), "y": float(root.attrib["height"])}
    for shape in root.iter():
        assert not re.search("nan|inf", " ".join(shape.attrib.values()))
        for name in ("x", "cx", "x1", "x2", "y", "cy", "y1", "y2"):
            if name in shape.attrib:
                limit = limits[name.strip("c12")]
                assert 0 <= float(shape.attrib[name]) <= limit, ElementTree.tostring(shape)
    return root


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{NAMESPACE}text")]


@settings(max_examples=40)
@given(st.lists(any_record(), max_size=30))
def test_any_records_make_pictures(records: list[RequestRecord]) -> None:
    for draw in (timeline, lengths):
        check(draw(records, "title", "below"))
        assert draw(records, "title") == draw(records, "title")


@settings(max_examples=40)
@given(st.lists(st.lists(any_record(), max_size=4), min_size=1, max_size=6), st.sampled_from([{}, {"ttft": 50.0}]))
def test_any_points_make_a_curve(points: list[list[RequestRecord]], limits: dict[str, float]) -> None:
    curve = [CurvePoint(str(index), summarize(records, limits)) for index, records in enumerate(points)]
    check(latency_curve(curve, "title"))


def test_a_bar_has_the_parts_of_its_request() -> None:
    whole = RequestRecord(index=0, due=0, start=1, first_token=3, last_token=6, end=6.5)
    assert spans(whole) == [(0, 1, "grey"), (1, 3, "orange"), (3, 6.5, "blue")]
    assert spans(record(start=1, ttft=1, end=9.0, error="timeout")) == [(1, 9, "red")]
    assert spans(RequestRecord(index=0, due=1, start=1, end=2)) == [(1, 2, "orange")]


def test_the_timeline_draws_every_request_in_order() -> None:
    records = [record(start=float(start)) for start in (2, 0, 1)]
    root = check(timeline(records, "title"))
    bars = [element for element in root.iter(f"{NAMESPACE}rect") if element.attrib.get("fill") == "#d9822b"]
    places = [(float(bar.attrib["y"]), float(bar.attrib["x"])) for bar in bars[1:]]  # the first is in the legend
    assert len(places) == 3
    assert places == sorted(places)


def test_the_curve_labels_its_points_and_shows_the_limit() -> None:
    points = [
        CurvePoint(label, summarize([record(ttft=ttft, tokens=tokens)], {"ttft": 300}))
        for label, ttft, tokens in (("1", 0.1, 5), ("8", 0.2, 20), ("inf", 0.4, 60))
    ]
    root = check(latency_curve(points, "title"))
    assert {"1", "8", "inf", "limit"} <= set(texts(root))
    assert len([line for line in root.iter() if "stroke-dasharray" in line.attrib]) == 1


@pytest.mark.parametrize(("slowest", "log"), [(1.0, False), (10.0, True)])
def test_latencies_far_apart_get_a_logarithmic_axis(slowest: float, log: bool) -> None:
    points = [CurvePoint("1", summarize([record(ttft=0.1)])), CurvePoint("2", summarize([record(ttft=slowest)]))]
    shown = texts(check(latency_curve(points, "title")))
    assert ("10,000" in shown and "100" in shown) is log


def test_lengths_say_their_statistics() -> None:
    shown = texts(check(lengths([record(prompt_tokens=n, tokens=n // 2) for n in (10, 20, 60)], "title")))
    assert "mean 30.0, p50 20, p99 59" in shown
    assert "mean 15.0, p50 10, p99 30" in shown
