"""quire fit prints the ledger for the settings it was given."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from quire.cli.main import main
from quire.config.engine import EngineConfig


def test_prints_the_ledger(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[EngineConfig] = []

    def plan_memory(config: EngineConfig) -> SimpleNamespace:
        asked.append(config)
        return SimpleNamespace(format=lambda: "weights  1 GiB\ntotal    1 GiB")

    planning = ModuleType("quire.worker.planning")
    monkeypatch.setattr(planning, "plan_memory", plan_memory, raising=False)
    monkeypatch.setitem(sys.modules, "quire.worker.planning", planning)
    assert main(["fit", "a.gguf", "--max-model-len", "128"]) == 0
    assert asked == [EngineConfig.from_flat(model="a.gguf", max_model_len=128)]
    assert capsys.readouterr().out == "weights  1 GiB\ntotal    1 GiB\n"
