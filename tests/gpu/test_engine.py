"""The engine on a GPU: recorded and launched steps, waiting and overlapping loops give the same tokens."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.platform.cuda import CudaPlatform
from tests.e2e.tiny import Answer, Driver
from tests.gpu.helpers import ROOMY_CACHE, SMALL_CACHE, engine, make_jobs, needs_gpu, run_jobs, tiny_model

pytestmark = needs_gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def contents(answers: dict[str, Answer]) -> dict[str, object]:
    assert all(answer.error is None for answer in answers.values())
    return {name: answer.content() for name, answer in answers.items()}


def test_recorded_and_launched_steps(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = make_jobs(40)
    core = engine(model, deterministic=True, kv_cache_memory=ROOMY_CACHE)
    recorded = contents(run_jobs(core, jobs, seed=1))
    core.shutdown()
    monkeypatch.setattr(CudaPlatform, "graph_sizes", ())
    core = engine(model, deterministic=True, kv_cache_memory=ROOMY_CACHE)
    assert contents(run_jobs(core, jobs, seed=2)) == recorded
    core.shutdown()


def test_waiting_and_overlapping_loops(model: Path) -> None:
    """With arrivals at random steps, aborts, and blocks for a few requests only, so that many are preempted."""
    jobs = make_jobs(60, longest=200)
    doomed = [job.name for job in jobs[::7]]
    found = []
    for depth in (1, 2, 3):
        core = engine(
            model, deterministic=True, kv_cache_memory=SMALL_CACHE, steps_in_flight=depth, max_model_len=512
        )
        answers = run_jobs(core, jobs, seed=depth, aborted=doomed)
        assert core.scheduler.stats().num_preemptions > 0
        found.append({name: answer.content() for name, answer in answers.items() if name not in doomed})
        core.shutdown()
    assert found[0] == found[1] == found[2]


def test_one_hash_of_200_schedules(model: Path) -> None:
    """Batches, chunks, prefix hits and preemptions change; tokens and log-probabilities do not, to the bit."""
    jobs = make_jobs(12, longest=300)
    hashes = set()
    settings: list[dict[str, Any]] = [
        {"kv_cache_memory": ROOMY_CACHE},
        {"kv_cache_memory": ROOMY_CACHE, "max_num_batched_tokens": 64, "max_num_seqs": 5},
        {"kv_cache_memory": SMALL_CACHE, "max_model_len": 512},
        {"kv_cache_memory": ROOMY_CACHE, "max_num_batched_tokens": 300, "enable_prefix_caching": False},
    ]
    for kind in settings:
        core = engine(model, **{"deterministic": True, **kind})
        for seed in range(50):
            answers = contents(run_jobs(core, jobs, seed))
            hashes.add(hashlib.sha256(repr(sorted(answers.items())).encode()).hexdigest())
            if seed % 10 == 0:
                core.scheduler.reset_prefix_cache()
        core.shutdown()
    assert len(hashes) == 1


def test_the_loop_never_waits_for_the_device(model: Path) -> None:
    """Results are waited for by events; any other wait would stall the queue, and raises here."""
    core = engine(model, kv_cache_memory=ROOMY_CACHE)
    jobs = [job for job in make_jobs(60) if job.params.logprobs is None]
    assert len({job.params.temperature for job in jobs}) > 1

    def run() -> dict[str, Answer]:
        core.scheduler.reset_prefix_cache()
        driver = Driver(core)
        for job in jobs:
            driver.add(job.name, job.token_ids, job.params)
        driver.finish()
        return driver.answers

    contents(run())  # records steps and compiles kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        answers = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    contents(answers)
    core.shutdown()
