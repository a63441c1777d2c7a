from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Reference

from quire.metrics.catalog import Metric
from quire.metrics.series import Histogram, Number, Series

BOUNDS = (0.5, 1.0, 2.5)


@given(st.lists(st.tuples(st.floats(0, 4) | st.sampled_from(BOUNDS), st.integers(1, 3)), max_size=20))
def test_a_histogram_counts_as_prometheus_clients_own_does(observed: list[tuple[float, int]]) -> None:
    ours = Series(Metric("h", "histogram", "Help.", buckets=BOUNDS), lambda: Histogram(BOUNDS))
    registry = CollectorRegistry()
    theirs = Reference("quire:h", "Help.", ["model_name"], buckets=BOUNDS, registry=registry).labels("m")
    ours.at()
    for value, count in observed:
        ours.at().observe(value, count)
        for _ in range(count):
            theirs.observe(value)
    (family,) = registry.collect()
    expected = [(s.name, s.labels, s.value) for s in family.samples if not s.name.endswith("_created")]
    found = [(s.name, s.labels, pytest.approx(s.value)) for s in ours.expose("m").samples]
    assert sorted(expected, key=str) == sorted(found, key=str)


def test_each_set_of_labels_has_its_own_value() -> None:
    series = Series(Metric("c_total", "counter", "Help.", ("a", "b")), Number)
    series.at("x", "y").value += 2
    series.at("x", "z").value += 1
    series.at("x", "y").value += 1
    found = {(s.labels["a"], s.labels["b"]): s.value for s in series.expose("m").samples}
    assert found == {("x", "y"): 3, ("x", "z"): 1}
