"""Phases add up to the whole, and a process that fails says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.bench.startup import bench_startup, phases, run_probe
from quire.types.errors import BenchmarkError, ConfigError
from tests.bench.helpers import word_tokenizer


def test_phases_add_up() -> None:
    reached = iter([{"import": 1.0, "ready": 3.0}, {"import": 2.0, "ready": 5.0}])
    asked: list[str] = []

    def probe(settings: str) -> dict[str, float]:
        asked.append(settings)
        return next(reached)

    summary = bench_startup({"model": "m"}, 2, probe)
    assert asked == ['{"model": "m"}'] * 2
    assert {name: phase.p50 for name, phase in summary.phases_ms.items()} == {"import": 1500, "ready": 2500}
    assert (summary.total_ms.min, summary.total_ms.max) == (3000, 5000)
    assert phases({"a": 0.5, "b": 0.75}) == {"a": 0.5, "b": 0.25}


TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 600,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}


def test_a_fresh_process_goes_through_all_phases(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    word_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    reached = run_probe(json.dumps({"model": str(tmp_path), "load_format": "dummy", "kv_cache_memory": 1 << 20}))
    assert list(reached) == ["interpreter", "import torch", "import quire", "ready", "first token"]
    times = list(reached.values())
    assert times[0] > 0
    assert times == sorted(times)


def test_a_failing_process_says_why() -> None:
    with pytest.raises(BenchmarkError, match=r"exit code 1: .*JSONDecodeError"):
        run_probe("no settings")


def test_a_model_without_text_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    word_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"model": str(tmp_path), "load_format": "dummy", "kv_cache_memory": 1 << 20, "runner": "pooling"}
    with pytest.raises(BenchmarkError, match=r"^this model makes embeddings and no text; use .* generates$"):
        run_probe(json.dumps(settings))


def test_no_repeats_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="--repeats is 0"):
        bench_startup({}, 0)
