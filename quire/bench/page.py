"""One HTML file with the figures and pictures of a run; it opens offline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from quire.bench.tables import Grid

_STYLE = """
:root{color-scheme:light dark;--page:#f6f7f8;--card:#fff;--ink:#24292f;--dim:#6a737d;--line:#e1e4e8}
@media (prefers-color-scheme:dark){:root{--page:#0e1114;--card:#15181c;--ink:#d5dbe1;--dim:#8d96a0;--line:#282d33}}
body{margin:0;padding:32px 16px;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:960px;margin:auto}h1{font-size:22px;margin:0 0 4px}p{color:var(--dim);margin:0 0 24px}
table{border-collapse:collapse;background:var(--card);border-radius:8px;margin:0 0 24px}
td{font-variant-numeric:tabular-nums}
th,td{padding:6px 14px;text-align:right;border-bottom:1px solid var(--line)}
th:first-child,td:first-child{text-align:left}
svg{max-width:100%;height:auto;margin:0 0 24px;display:block}
pre{background:var(--card);padding:16px;border-radius:8px;overflow:auto;font-size:13px}
"""


def html_page(title: str, tables: Sequence[Grid], pictures: Sequence[str], environment: dict[str, Any]) -> str:
    """`pictures` are SVG texts."""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>",
        f"<h1>{escape(title)}</h1><p>{escape(environment['date'])} · {escape(environment['machine']['cpu'])}</p>",
        *(_table(rows) for rows in tables),
        *pictures,
        f"<pre>{escape(json.dumps(environment, indent=2))}</pre>",
        "</main></body></html>\n",
    ]
    return "\n".join(parts)


def _table(grid: Grid) -> str:
    lines = [_row(grid.header, "th"), *(_row(row, "td") for row in grid.rows)]
    return "<table>" + "".join(lines) + "</table>"


def _row(cells: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
