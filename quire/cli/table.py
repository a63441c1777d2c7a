"""Prints rows of text in columns."""

from __future__ import annotations

from collections.abc import Sequence


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Nothing, if there are no rows."""
    if not rows:
        return
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for row in (titles, *rows):
        print("   ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
