"""Runs on a GPU in deterministic mode are replayed to the same bits, drafts and grammars among them."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.cli.main import main
from tests.gpu.helpers import needs_gpu, tiny_model
from tests.replay.test_speculation import record

pytestmark = needs_gpu


def test_a_deterministic_run_is_replayed_to_the_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace"
    record(tiny_model(tmp_path / "model"), path, 0, device="cuda", deterministic=True, max_model_len=1024)
    assert main(["replay", str(path)]) == 0
    assert capsys.readouterr().out.startswith("EQUAL: ")
