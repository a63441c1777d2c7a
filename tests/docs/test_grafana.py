"""The dashboard asks for metrics that exist, by labels that they have, and shows all of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from quire.metrics.catalog import METRICS, PREFIX

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs" / "grafana" / "quire.json").read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES: list[str] = [target["expr"] for panel in PANELS for target in panel["targets"]]
LABELS = {
    f"{metric.name}{suffix}": {"model_name", *metric.labels} | ({"le"} if suffix == "_bucket" else set())
    for metric in METRICS
    for suffix in (("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",))
}


def test_queries_name_metrics_and_labels_that_exist() -> None:
    for query in QUERIES:
        names = re.findall(rf"{PREFIX}(\w+)", query)
        assert names, query
        assert set(names) <= LABELS.keys(), query
        used = [re.split(r", *", group) for group in re.findall(r"by \(([^)]+)\)", query)]
        used += [re.findall(r"(\w+)=", group) for group in re.findall(r"\{([^}]+)\}", query)]
        for name in names:
            assert {label for group in used for label in group} <= LABELS[name], query


def test_every_metric_is_shown() -> None:
    shown = " ".join(QUERIES)
    assert [metric.name for metric in METRICS if f"{PREFIX}{metric.name}" not in shown] == []


def test_panels_do_not_overlap_and_have_their_own_ids() -> None:
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))


def test_it_can_be_imported_anywhere() -> None:
    sources = [panel["datasource"]["uid"] for panel in PANELS]
    assert set(sources) == {"${datasource}"}
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == ["datasource", "model_name"]
