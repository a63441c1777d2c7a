"""The page escapes what it shows."""

from __future__ import annotations

from quire.bench.page import html_page
from quire.bench.tables import Grid


def test_cells_and_titles_are_text() -> None:
    grid = Grid(["a", "<b>"], [("1", "x & y")])
    page = html_page("<title>", [grid], ["<svg></svg>"], {"date": "d", "machine": {"cpu": "c"}})
    assert "<h1>&lt;title&gt;</h1>" in page
    assert "<tr><th>a</th><th>&lt;b&gt;</th></tr><tr><td>1</td><td>x &amp; y</td></tr>" in page
    assert "<svg></svg>" in page
