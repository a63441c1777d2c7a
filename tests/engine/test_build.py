from __future__ import annotations

from pathlib import Path

import pytest

from quire.config.engine import EngineConfig
from quire.engine.build import build_engine
from quire.types.errors import ConfigError, UnknownNameError


def test_an_unknown_grammar_backend_is_refused_before_a_model_is_looked_for(tmp_path: Path) -> None:
    config = EngineConfig.from_flat(model=str(tmp_path / "nothing"), structured_outputs_backend="abacus")
    with pytest.raises(UnknownNameError, match="unknown structured output backend 'abacus'"):
        build_engine(config)


def test_a_grammar_backend_that_is_not_installed_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.structured.registry.find_spec", lambda package: None)
    config = EngineConfig.from_flat(model=str(tmp_path / "nothing"), structured_outputs_backend="xgrammar")
    with pytest.raises(ConfigError, match=r"'xgrammar' needs the Python package 'xgrammar'.*install it"):
        build_engine(config)
