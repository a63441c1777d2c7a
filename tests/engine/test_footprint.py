"""The memory that engines of several ranks will take."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config.engine import EngineConfig
from quire.engine.footprint import PlanOrder, make_plans
from tests.e2e.tiny import make_model


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 2)], ids=str)
def test_stages_count_as_ranks_do(tmp_path: Path, sizes: tuple[int, int]) -> None:
    model = make_model(tmp_path / "model", "llama")
    ranks = {"tensor_parallel_size": sizes[0], "pipeline_parallel_size": sizes[1]}
    common = {"model": str(model), "device": "cpu", "max_model_len": 256, "kv_cache_memory": 1 << 24}
    configs = [EngineConfig.from_flat(**common), EngineConfig.from_flat(**common, **ranks)]
    alone, several = make_plans(PlanOrder(configs, 1 << 34)).engines
    assert (several.error, several.num_ranks) == (None, sizes[0] * sizes[1])
    assert alone.weights <= several.weights < 2 * alone.weights, "the weights of all stages, norms once for each rank"
    assert several.total > alone.total
    assert several.pinned(configs[1]).cache.kv_cache_memory == several.kv_cache_memory > 0
