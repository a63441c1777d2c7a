"""Stages of a pipeline in one process: recorded like any model, and without the parts that others hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.engine import EngineConfig
from quire.engine.build import build_engine
from quire.models.decoder import DecoderLM
from quire.parallel.pipeline import split_layers
from quire.types.errors import ConfigError
from quire.types.sampling import SamplingParams
from quire.worker.registry import EXECUTORS
from tests.e2e.tiny import Driver, make_engine, make_model
from tests.gpu.helpers import make_jobs, run_jobs
from tests.gpu.stages import StagesInOneProcess

SETTINGS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 96}


def make_stages(model: Path, **settings: Any) -> Any:
    if "stages-in-one-process" not in EXECUTORS:
        EXECUTORS.register("stages-in-one-process", StagesInOneProcess)
    config = EngineConfig.from_flat(model=str(model), **SETTINGS, **settings)
    return build_engine(config, executor_name="stages-in-one-process")[0]


@pytest.mark.parametrize("tied", [False, True])
def test_stages_are_recorded_and_hold_their_own_layers(tied: bool, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", tie_word_embeddings=tied)
    one, jobs = make_engine(model, **SETTINGS), make_jobs(16, longest=100)
    expected = run_jobs(one, jobs, seed=3)
    one.shutdown()
    core = make_stages(model, pipeline_parallel_size=3)
    executor = core.executor
    found = run_jobs(core, jobs, seed=3)
    for name, answer in expected.items():
        assert found[name].content() == answer.content(), name
    assert executor.ways == [{"kernel list"}] * 3
    names = [{name for name, _ in worker.model.named_parameters()} for worker in executor.workers]
    models = [worker.model for worker in executor.workers]
    assert all(isinstance(each, DecoderLM) for each in models)
    assert [hasattr(each.model, "embed_tokens") for each in models] == [True, False, tied]
    assert [each.lm_head is not None for each in models] == [False, False, True]
    assert not names[0] & names[1]
    core.shutdown()


def test_a_request_that_breaks_heals_its_blocks_in_every_stage(tmp_path: Path) -> None:
    core = make_stages(make_model(tmp_path / "model", "llama"), pipeline_parallel_size=2)
    first, last = core.executor.workers
    driver = Driver(core)
    driver.add("bad", [5, 6, 7, 8], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    table = first.model.model.embed_tokens.method
    embed = table.embed
    table.embed = lambda ids: embed(ids) * float("nan")  # recorded steps do not see it
    first.runner.ways = first.runner.ways[-1:]
    assert driver.finish()["bad"].error is not None
    table.embed = embed
    driver.add("good", [5, 6, 7, 8], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    assert driver.finish()["good"].error is None
    for worker in (first, last):
        for layer in worker.model.cached_layers():
            assert bool(torch.isfinite(layer.cache.float()).all())
    core.shutdown()


@pytest.mark.parametrize(
    ("layers", "first", "last", "stages", "expected"),
    [
        ([1, 1, 1, 1], 0, 0, 2, [(0, 2), (2, 4)]),
        ([1, 1, 1, 1], 0, 2, 2, [(0, 3), (3, 4)]),
        ([1] * 10, 3, 3, 3, [(0, 3), (3, 8), (8, 10)]),
        ([5, 1, 1, 1], 0, 0, 3, [(0, 1), (1, 3), (3, 4)]),
        ([1, 1, 1], 9, 0, 3, [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_layers_are_split_by_memory(
    layers: list[int], first: int, last: int, stages: int, expected: list[tuple[int, int]]
) -> None:
    assert split_layers(layers, first, last, stages) == expected


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="the model has 2 layers; it takes 1 to 2 stages"):
        split_layers([1, 1], 0, 0, 3)
