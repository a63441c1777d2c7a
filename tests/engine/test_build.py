from __future__ import annotations

from pathlib import Path

import pytest

from quire.config.engine import EngineConfig
from quire.engine.build import build_engine
from quire.types.errors import UnknownNameError


def test_an_unknown_grammar_backend_is_refused_before_a_model_is_looked_for(tmp_path: Path) -> None:
    config = EngineConfig.from_flat(model=str(tmp_path / "nothing"), structured_outputs_backend="abacus")
    with pytest.raises(UnknownNameError, match="unknown structured output backend 'abacus'"):
        build_engine(config)
