"""quire fit prints the ledger for the settings it was given."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from quire.cli.main import main
from quire.config.engine import EngineConfig


def test_prints_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "a.gguf"
    model.touch()
    asked: list[EngineConfig] = []

    def plan_memory(config: EngineConfig) -> SimpleNamespace:
        asked.append(config)
        return SimpleNamespace(format=lambda: "weights  1 GiB\ntotal    1 GiB")

    planning = ModuleType("quire.worker.planning")
    monkeypatch.setattr(planning, "plan_memory", plan_memory, raising=False)
    monkeypatch.setitem(sys.modules, "quire.worker.planning", planning)
    assert main(["fit", str(model), "--max-model-len", "128"]) == 0
    assert asked == [EngineConfig.from_flat(model=str(model), max_model_len=128)]
    assert capsys.readouterr().out == "weights  1 GiB\ntotal    1 GiB\n"


def test_a_config_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "max_position_embeddings": 256, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = ["fit", str(tmp_path), "--kv-cache-dtype", "float32", "--kv-cache-memory"]
    assert main([*command, "1MiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["KV", "blocks", "1MiB", "64", "blocks,", "1024", "tokens"]
    assert lines[-1] == "max_model_len = 256 (what the model was trained for)"
    assert " parameters of 32." in lines[0]
    (tmp_path / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    assert main([*command, "1MiB"]) == 0
    assert " parameters of 16." in capsys.readouterr().out.splitlines()[0]
    assert main([*command, "10KiB"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: kv_cache_memory is 10KiB but one request of 128 tokens needs ")
    assert line.endswith("; set --kv-cache-memory 1MiB")
