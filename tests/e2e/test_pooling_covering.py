"""Pooling under every pair of settings: a vector is, to the bit, what its prompt alone gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.types.sampling import PoolingParams
from quire.types.step import Pooled
from tests.e2e.covering import Row, covering_rows
from tests.e2e.test_encoders import make_encoder
from tests.e2e.test_pooling import PROMPTS, pool
from tests.e2e.tiny import make_engine, make_model
from tests.runner.engines import run_eagerly

FACTORS: dict[str, list[Any]] = {
    "model": ["decoder", "encoder", "windows"],
    "pooling": ["cls", "last", "mean", "all", "step"],
    "way": ["fastest", "eager"],
    "steps_in_flight": [1, 3],
    "max_num_batched_tokens": [160, 400],  # a decoder of fewer takes prompts in chunks: see CHUNK
    "max_num_seqs": [1, 4],
    "enable_prefix_caching": [False, True],
    "dimensions": [None, 8],
    "attended_tokens": [None, 9],  # of bidirectional attention: those behind are no keys, as masks of ColBERT
}
CHUNK = {160: 23, 400: 400}
TAG = PROMPTS[0][-1]
ROWS = covering_rows(FACTORS, strength=2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pooling")
    make_encoder(folder / "encoder", "Bert")
    make_encoder(folder / "windows", "ModernBert")
    return {
        "decoder": make_model(folder / "decoder", "llama", num_hidden_layers=2),
        "encoder": folder / "encoder",
        "windows": folder / "windows",
    }


@pytest.fixture(scope="module")
def alone(models: dict[str, Path]) -> dict[Any, list[Pooled | None]]:
    """By the model and parameters: vectors of prompts that had an engine for themselves."""
    found: dict[Any, list[Pooled | None]] = {}
    for name, folder in models.items():
        core = make_engine(folder, runner="pooling", max_model_len=150, enable_prefix_caching=False)
        for row in (row for row in ROWS if row["model"] == name):
            asked = [pool(core, [tokens], params_of(row))[0] for tokens in prompts_of(row)]
            found[name, params_of(row)] = [output.pooled for output in asked]
    return found


def params_of(row: Row) -> PoolingParams:
    tag = TAG if row["pooling"] == "step" else None
    attended = None if row["model"] == "decoder" else row["attended_tokens"]
    of_vectors = {"pooling": row["pooling"], "dimensions": row["dimensions"]}
    return PoolingParams(**of_vectors, step_tag_id=tag, attended_tokens=attended)


def prompts_of(row: Row) -> list[list[int]]:
    """Those that `pooling` can be asked of."""
    return [tokens for tokens in (*PROMPTS, PROMPTS[0][60:]) if row["pooling"] != "step" or TAG in tokens]


@pytest.mark.parametrize("row", ROWS, ids=[str(index) for index in range(len(ROWS))])
def test_every_pair(row: Row, models: dict[str, Path], alone: dict[Any, list[Pooled | None]]) -> None:
    budget = row["max_num_batched_tokens"]
    if row["model"] == "decoder":
        budget = CHUNK[budget]
    core = make_engine(
        models[row["model"]],
        runner="pooling",
        max_model_len=150,
        max_num_batched_tokens=budget,
        **{key: row[key] for key in ("steps_in_flight", "max_num_seqs", "enable_prefix_caching")},
    )
    if row["way"] == "eager":
        run_eagerly(core)
    expected = alone[row["model"], params_of(row)]
    for _ in range(2):  # the second time over what the first has cached
        assert [output.pooled for output in pool(core, prompts_of(row), params_of(row))] == expected
    assert core.scheduler.kv.num_free_blocks == core.scheduler.kv.num_blocks
