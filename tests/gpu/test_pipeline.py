"""Stages of a pipeline on one GPU, in one process: the tokens of one stage, with decode steps as CUDA graphs."""

from __future__ import annotations

from pathlib import Path

from quire.config.engine import EngineConfig
from quire.engine.build import build_engine
from quire.worker.registry import EXECUTORS
from tests.gpu.helpers import engine, make_jobs, needs_gpu, run_jobs, tiny_model
from tests.gpu.stages import StagesInOneProcess

pytestmark = needs_gpu


def test_two_stages_on_a_gpu_give_the_tokens_of_one(tmp_path: Path) -> None:
    model, jobs = tiny_model(tmp_path / "model"), make_jobs(24, longest=100)
    plain = engine(model, deterministic=True)
    expected = run_jobs(plain, jobs, seed=1)
    plain.shutdown()
    EXECUTORS.register("stages-in-one-process", StagesInOneProcess)
    config = EngineConfig.from_flat(
        model=str(model),
        device="cuda",
        max_model_len=1024,
        deterministic=True,
        kv_cache_memory="64MiB",
        pipeline_parallel_size=2,
    )
    core, _, _ = build_engine(config, executor_name="stages-in-one-process")
    found = run_jobs(core, jobs, seed=2)
    executor = core.executor
    assert isinstance(executor, StagesInOneProcess)
    core.shutdown()
    for name, answer in expected.items():
        assert found[name].token_ids == answer.token_ids, name
    assert executor.ways[0] == {"CUDA graph", "eager"}, "decode steps of the first stage are captured"
    assert "CUDA graph" in executor.ways[1]
