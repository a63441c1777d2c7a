"""The engine on a GPU: captured and eager steps, waiting and overlapping loops give the same tokens."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from quire.platform.cuda import CudaPlatform
from quire.runner.containment import MESSAGE
from quire.types.sampling import SamplingParams
from tests.e2e.broken import BAD, BAD_PROMPT, GOOD_PROMPT, assert_finite, make_broken
from tests.e2e.tiny import VOCAB, Answer, Driver, make_model
from tests.gpu.helpers import (
    ROOMY_CACHE,
    SIZES,
    SMALL_CACHE,
    Job,
    constrained,
    engine,
    make_jobs,
    needs_gpu,
    run_jobs,
    shaped,
    tiny_model,
)
from tests.runner.engines import spy_on

pytestmark = needs_gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def contents(answers: dict[str, Answer]) -> dict[str, object]:
    assert all(answer.error is None for answer in answers.values())
    return {name: answer.content() for name, answer in answers.items()}


def test_captured_and_eager_steps(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With everything that changes logits, beside each other and beside plain rows."""
    jobs = [*make_jobs(40), *(replace(job, name=f"shaped {job.name}") for job in shaped(make_jobs(40, seed=1)))]
    core = engine(model, deterministic=True, kv_cache_memory=ROOMY_CACHE)
    spy = spy_on(core)
    run_jobs(core, [Job("plain", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))], seed=0)
    captured = contents(run_jobs(core, jobs, seed=1))
    kinds = {shape.sampling for shape in spy.ran}
    assert {kind.greedy for kind in kinds} == {bool(kind.groups) for kind in kinds} == {False, True}
    assert {kind.logprobs for kind in kinds} >= {None, 5}
    while core.capture_next():  # all that an idle engine captures, with buffers that steps have used
        pass
    assert contents(run_jobs(core, jobs, seed=3)) == captured
    core.shutdown()
    monkeypatch.setattr(CudaPlatform, "graph_sizes", ())
    core = engine(model, deterministic=True, kv_cache_memory=ROOMY_CACHE)
    assert contents(run_jobs(core, jobs, seed=2)) == captured
    core.shutdown()


def test_layers_that_see_a_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have block tables of their own, and blocks that nobody sees any more are given away."""
    kinds = ["sliding_attention", "full_attention"]
    model = make_model(tmp_path, "gemma3_text", **{**SIZES, "sliding_window": 48, "layer_types": kinds})
    jobs = make_jobs(40)
    core = engine(model, deterministic=True, kv_cache_memory=ROOMY_CACHE)
    captured = contents(run_jobs(core, jobs, seed=1))
    core.shutdown()
    monkeypatch.setattr(CudaPlatform, "graph_sizes", ())
    core = engine(model, deterministic=True, kv_cache_memory=ROOMY_CACHE)
    assert contents(run_jobs(core, jobs, seed=2)) == captured
    core.shutdown()


def test_waiting_and_overlapping_loops(model: Path) -> None:
    """With arrivals at random steps, aborts, and blocks for a few requests only, so that many are preempted."""
    jobs = [
        replace(job, params=msgspec.structs.replace(job.params, max_tokens=24)) for job in make_jobs(60, longest=200)
    ]
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


def test_masked_rows_in_all_loops(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammars beside free rows, with preemption: captured at every depth, then eager, the same to the bit."""
    jobs = [
        replace(job, params=msgspec.structs.replace(job.params, max_tokens=24, ignore_eos=False))
        for job in constrained(make_jobs(48, longest=200))
    ]
    found = []
    for depth in (1, 2, 3, 1):
        if len(found) == 3:
            monkeypatch.setattr(CudaPlatform, "graph_sizes", ())
        core = engine(
            model, deterministic=True, kv_cache_memory=SMALL_CACHE, steps_in_flight=depth, max_model_len=512
        )
        spy = spy_on(core)
        found.append(contents(run_jobs(core, jobs, seed=depth)))
        assert core.scheduler.stats().num_preemptions > 0
        if len(found) < 4:
            assert any(shape.is_decode and shape.sampling.masked for shape in spy.ran)
        core.shutdown()
    assert found[0] == found[1] == found[2] == found[3]


def test_full_prompt_steps_captured_and_eager(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 2,048 tokens: parts of long prompts, several prompts, and prompts beside rows that decode."""
    size = 2048
    rng = random.Random(5)
    jobs = [
        Job(str(index), [rng.randrange(3, VOCAB) for _ in range(rng.choice([60, 300, 700, 1000]))], job.params)
        for index, job in enumerate(make_jobs(40))
    ]
    settings: dict[str, Any] = {
        "deterministic": True,
        "kv_cache_memory": ROOMY_CACHE,
        "max_num_batched_tokens": size,
        "max_num_seqs": 64,
        "step_time_target": 0.0,  # steps are full
    }
    core = engine(model, **settings)
    spy = spy_on(core)
    captured = contents(run_jobs(core, jobs, seed=1))
    assert any(shape.num_tokens == size for shape in spy.ran)
    core.shutdown()
    monkeypatch.setattr(CudaPlatform, "graph_sizes", ())
    core = engine(model, **settings)
    assert contents(run_jobs(core, jobs, seed=1)) == captured
    core.shutdown()


@pytest.mark.parametrize("graph_sizes", [None, ()])
def test_what_breaks_fails_alone(model: Path, monkeypatch: pytest.MonkeyPatch, graph_sizes: tuple[()] | None) -> None:
    """Recorded and launched; token 0, which steps are padded with, is broken too."""
    if graph_sizes is not None:
        monkeypatch.setattr(CudaPlatform, "graph_sizes", graph_sizes)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    forced = SamplingParams(temperature=0.0, max_tokens=6, allowed_token_ids=[BAD])
    sound = engine(model, deterministic=True, kv_cache_memory=ROOMY_CACHE)
    expected = run_jobs(sound, [Job("good", GOOD_PROMPT, params)], seed=0)["good"]
    sound.shutdown()
    core = make_broken(model, device="cuda", max_model_len=1024, deterministic=True, kv_cache_memory=ROOMY_CACHE)
    jobs = [Job("bad", BAD_PROMPT, params), Job("good", GOOD_PROMPT, params), Job("late", GOOD_PROMPT, forced)]
    answers = run_jobs(core, jobs, seed=1)
    assert answers["bad"].error == MESSAGE
    assert answers["late"].token_ids == [BAD]
    assert "NaN" in str(answers["late"].error)
    assert answers["good"].content() == expected.content()
    assert_finite(core)
    core.shutdown()


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
    others = (replace(job, name=f"shaped {job.name}") for job in shaped(make_jobs(40, seed=1)))
    jobs = [*constrained(make_jobs(40)), *others]
    assert len({job.params.temperature for job in jobs}) > 1

    def run() -> dict[str, Answer]:
        core.scheduler.reset_prefix_cache()
        driver = Driver(core)
        for job in jobs:
            driver.add(job.name, job.token_ids, job.params, grammar=job.grammar)
        while core.has_unfinished():
            driver.step()
        return driver.answers

    contents(run())  # captures steps and compiles kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        answers = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    contents(answers)
    core.shutdown()
