"""--parallel auto: a process of its own plans for this machine, and what it refuses is told."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from quire.cli.topology import answer
from quire.config.engine import EngineConfig
from quire.frontend import topology
from quire.frontend.topology import TopologyOrder, with_topology
from quire.types.errors import ConfigError, MemoryPlanError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def test_sizes_are_chosen_and_explained(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    asked = EngineConfig.from_flat(model=str(tmp_path), parallel="auto", device="cpu")
    with caplog.at_level("INFO", logger="quire"):
        found = with_topology(asked).parallel
    assert (found.parallel, found.num_ranks, found.data_parallel_size) == ("manual", 1, 1)
    assert "parallel auto chose -tp 1 -pp 1 -dp 1: 1 rank holds the model" in caplog.text


def test_what_does_not_fit_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the other process does it, here."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def planned_by(module: str, order: TopologyOrder) -> bytes:
        return msgspec.json.encode(answer(order))

    monkeypatch.setattr(topology, "planned_by", planned_by)
    large = EngineConfig.from_flat(model=str(tmp_path), parallel="auto", device="cpu", kv_cache_memory="900TiB")
    with pytest.raises(MemoryPlanError, match="no topology of up to 1 cards holds the model: not enough memory"):
        with_topology(large)
    with pytest.raises(ConfigError, match="absent"):
        with_topology(EngineConfig.from_flat(model=str(tmp_path / "absent"), parallel="auto", device="cpu"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 2}, "parallel is 'auto' and tensor_parallel_size is 2"),
        ({"data_parallel_size": 2}, "parallel is 'auto' and data_parallel_size is 2"),
        ({"executor": "ray"}, "set the sizes yourself"),
    ],
)
def test_what_does_not_go_with_it(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_flat(model="smollm2", parallel="auto", **settings)


def test_sizes_that_are_set_stay() -> None:
    config = EngineConfig.from_flat(model="smollm2", tensor_parallel_size=2)
    assert with_topology(config) is config
