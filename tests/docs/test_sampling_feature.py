"""docs/internals/adding-a-sampling-feature.md: what is printed there works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.runner.sampling import registry
from quire.runner.sampling.registry import FEATURES
from quire.runner.sampling.sampler import Sampler
from quire.types.sampling import SamplingParams
from tests.e2e.tiny import Driver, make_engine, make_model
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


def test_an_engine_with_its_line_serves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, line = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = dict(vars(registry))
    exec(code + line, names)
    monkeypatch.setattr(registry, "FEATURES", names["FEATURES"])
    driver = Driver(make_engine(make_model(tmp_path / "model", "llama", num_hidden_layers=1)))
    for parity in (0, 1, None):
        extra = None if parity is None else {"parity": parity}
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, extra_args=extra)
        driver.add(str(parity), [5, 6, 7], params)
    answers = driver.finish()
    parities = {name: {token % 2 for token in answer.token_ids} for name, answer in answers.items()}
    assert parities == {"0": {0}, "1": {1}, "None": {0, 1}}
