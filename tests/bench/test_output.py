"""What a run leaves behind: a report, pictures, and a page that needs nothing else."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

from quire.bench.output import plain_record, save_run
from quire.bench.stats import summarize
from tests.bench.helpers import record

ENVIRONMENT = {"date": "2026-01-01", "machine": {"cpu": "<abacus>"}, "command": "quire bench"}


def test_report_pictures_and_page(tmp_path: Path) -> None:
    records = [record(index=0), record(index=1, error="timeout", message="slow")]
    summary = summarize(records)
    paths = save_run(tmp_path / "a", "serve", ENVIRONMENT, {"n": 1}, summary, records)
    assert [path.name for path in paths] == ["serve-timeline.svg", "serve-lengths.svg", "serve.html", "serve.json"]
    report = json.loads(paths[-1].read_text())
    assert report["settings"] == {"n": 1}
    assert report["results"]["summary"] == summary.to_dict()
    assert [entry.get("error") for entry in report["results"]["requests"]] == [None, "timeout"]
    page = paths[2].read_text()
    assert page.count("<svg") == 2
    assert "&lt;abacus&gt;" in page
    assert not re.search(r"(src|href)=", page)
    HTMLParser().feed(page)


def test_a_saved_request_has_no_gaps_and_rounded_times() -> None:
    plain = plain_record(record(start=1 / 3))
    assert "gaps" not in plain
    assert plain["start"] == 0.333333
