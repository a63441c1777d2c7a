"""Covering arrays: few rows in which every combination of values of any three factors occurs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
_CANDIDATES = 30


def covering_rows(factors: Mapping[str, Sequence[Any]], strength: int = 3, seed: int = 0) -> list[Row]:
    """Greedy: each row is the best of a few that begin with a combination not covered yet."""
    rng = random.Random(seed)
    missing = {
        tuple(zip(names, places, strict=True))
        for names in combinations(factors, strength)
        for places in product(*(range(len(factors[name])) for name in names))
    }
    rows: list[dict[str, int]] = []
    while missing:
        best: dict[str, int] = {}
        best_covered: set[tuple[tuple[str, int], ...]] = set()
        wanted = dict(min(missing))
        for _ in range(_CANDIDATES):
            row = {name: rng.randrange(len(values)) for name, values in factors.items()}
            row |= wanted
            covered = {entry for names in combinations(factors, strength) if (entry := _entry(row, names)) in missing}
            if len(covered) > len(best_covered):
                best, best_covered = row, covered
        rows.append(best)
        missing -= best_covered
    return [{name: factors[name][place] for name, place in row.items()} for row in rows]


def _entry(row: dict[str, int], names: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    return tuple((name, row[name]) for name in names)
