"""Covering arrays: few rows in which every combination of values of any three factors occurs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np

Row = dict[str, Any]
_CANDIDATES = 30


def covering_rows(factors: Mapping[str, Sequence[Any]], strength: int = 3, seed: int = 0) -> list[Row]:
    """Greedy: each row is the best of a few that begin with a combination not covered yet."""
    rng = random.Random(seed)
    names = list(factors)
    sizes = np.array([len(factors[name]) for name in names])
    chosen = list(combinations(range(len(names)), strength))  # factors by number
    # An entry is a combination of factors with a value of each. They are numbered as they are made, the last value
    # fastest, so that the number of an entry is a sum over its factors.
    entries = [
        tuple((names[factor], value) for factor, value in zip(factors_of, values, strict=True))
        for factors_of in chosen
        for values in product(*(range(sizes[factor]) for factor in factors_of))
    ]
    columns = np.array(chosen)
    counts = sizes[columns]
    steps = np.cumprod(np.hstack([counts, np.ones((len(chosen), 1), dtype=int)])[:, :0:-1], axis=1)[:, ::-1]
    starts = np.cumsum(counts.prod(axis=1)) - counts.prod(axis=1)
    in_order = sorted(range(len(entries)), key=entries.__getitem__)
    is_missing = np.ones(len(entries), dtype=bool)
    rows: list[dict[str, int]] = []
    for number in in_order:
        if not is_missing[number]:
            continue
        wanted = dict(entries[number])
        candidates = [
            {name: rng.randrange(len(factors[name])) for name in names} | wanted for _ in range(_CANDIDATES)
        ]
        values = np.array([list(row.values()) for row in candidates])
        covered = starts + (values[:, columns] * steps).sum(axis=2)  # [candidates, combinations of factors]
        best = int(is_missing[covered].sum(axis=1).argmax())
        is_missing[covered[best]] = False
        rows.append(candidates[best])
    assert not is_missing.any()
    return [{name: factors[name][place] for name, place in row.items()} for row in rows]
