"""docs/internals/adding-a-sampling-feature.md: what is printed there works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from quire.runner.sampling.registry import FEATURES
from quire.runner.sampling.sampler import Sampler
from tests.runner.sampling.helpers import CPU, make_logits, make_row, run

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "adding-a-sampling-feature.md"


def test_the_printed_feature() -> None:
    code, line = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    place: dict[str, Any] = {}
    exec(code, place)
    assert line.startswith(f"FEATURES: list[MakeFeature] = [{', '.join(make.__name__ for make in FEATURES)}, Parity]")
    logits = make_logits(2, 3, 60)
    rows = [make_row(temperature=0.0, extra_args=extra) for extra in ({"parity": 1}, None, {"parity": 0})]
    found = run(logits, rows, sampler=Sampler(60, 12, CPU, [*FEATURES, place["Parity"]]))
    odd, any_token, even = found.tokens()
    assert (odd % 2, even % 2) == (1, 0)
    assert any_token == int(torch.tensor(logits[1]).argmax())
    assert found.kind.eager
