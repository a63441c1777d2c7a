"""Drafts on a GPU: the same tokens as without any in deterministic mode, and the same distribution always."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.runner.cuda_graphs import CudaGraphs
from quire.types.sampling import SamplingParams
from tests.e2e.drafting import Oracle, draft_always, draft_with
from tests.e2e.tiny import VOCAB, Answer, make_model
from tests.gpu.helpers import (
    ROOMY_CACHE,
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
from tests.runner.engines import run_eagerly, spy_on
from tests.runner.test_kept_hidden import drafter

pytestmark = needs_gpu
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def contents(answers: dict[str, Answer]) -> dict[str, object]:
    assert {name: answer.error for name, answer in answers.items() if answer.error} == {}
    return {name: answer.content() for name, answer in answers.items()}


def all_jobs(longest: int = 400) -> list[Job]:
    return [
        *make_jobs(30, longest=longest),
        *(replace(job, name=f"shaped {job.name}") for job in shaped(make_jobs(24, 1, longest))),
        *(replace(job, name=f"constrained {job.name}") for job in constrained(make_jobs(12, 2, longest))),
    ]


def speculating(model: Path, known: dict[str, Answer], wrong: float, **settings: Any) -> Any:
    core = engine(model, speculative_config=SPECULATIVE, **settings)
    draft_with(core, Oracle({name: answer.token_ids for name, answer in known.items()}, VOCAB, wrong=wrong))
    return core


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_deterministic_tokens_are_those_of_no_speculation(model: Path, wrong: float, depth: int) -> None:
    settings = {"deterministic": True, "kv_cache_memory": ROOMY_CACHE}
    known = run_jobs(engine(model, **settings), all_jobs(), seed=1)
    core = speculating(model, known, wrong, steps_in_flight=depth, **settings)
    spy = spy_on(core)
    assert contents(run_jobs(core, all_jobs(), seed=2)) == contents(known)
    assert isinstance(spy.way, CudaGraphs)
    assert sum(shape.sampling.drafted for shape in spy.ran) > 5


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model", "eagle", "eagle3", "medusa", "mtp"])
def test_every_drafter_leaves_deterministic_tokens_as_they_are(tmp_path: Path, method: str) -> None:
    sizes: dict[str, Any] = {"max_position_embeddings": 512}
    if method != "medusa":
        sizes |= {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    name = method if method in ("eagle", "eagle3", "medusa", "mtp") else "eagle"  # of the others the target alone
    target, config = drafter(tmp_path, name, **sizes)
    if method == "draft_model":
        config = {"method": method, "model": str(make_model(tmp_path / "smaller", "llama", **sizes))}
    elif name != method:
        config = {"method": method, **({"prompt_lookup_min": 1} if method == "ngram" else {})}
    settings = {"deterministic": True, "kv_cache_memory": ROOMY_CACHE, "max_model_len": 256}
    known = run_jobs(engine(target, **settings), all_jobs(longest=100), seed=1)
    core = engine(target, speculative_config={**config, "num_speculative_tokens": 3}, **settings)
    draft_always(core)
    spy = spy_on(core)
    assert contents(run_jobs(core, all_jobs(longest=100), seed=2)) == contents(known)
    assert sum(shape.sampling.drafted for shape in spy.ran) > 5


def test_eager_steps_give_the_bits_of_captured_ones(model: Path) -> None:
    settings = {"deterministic": True, "kv_cache_memory": ROOMY_CACHE}
    known = run_jobs(engine(model, **settings), all_jobs(), seed=1)
    core = speculating(model, known, 0.3, **settings)
    run_eagerly(core)
    assert contents(run_jobs(core, all_jobs(), seed=4)) == contents(known)


def test_preempted_requests_go_on(model: Path) -> None:
    known = run_jobs(engine(model, deterministic=True, kv_cache_memory=ROOMY_CACHE), make_jobs(30), seed=1)
    small = {"kv_cache_memory": SMALL_CACHE * 5 // 8, "max_model_len": 512}
    core = speculating(model, known, 0.3, deterministic=True, steps_in_flight=2, **small)
    assert contents(run_jobs(core, make_jobs(30), seed=2)) == contents(known)
    assert core.scheduler.stats().num_preemptions > 0


def test_fast_steps_draw_from_the_same_distribution(model: Path) -> None:
    """Over seeds: two sets of samples at one position, the second behind drafts of the first."""
    count = 600
    jobs = [
        Job(str(seed), [9, 8, 7], SamplingParams(temperature=1.0, seed=seed, max_tokens=6, ignore_eos=True))
        for seed in range(count)
    ]
    settings = {"kv_cache_memory": ROOMY_CACHE}
    plain = run_jobs(engine(model, **settings), jobs, seed=1)
    others = [replace(job, params=replace_seed(job.params, count + index)) for index, job in enumerate(jobs)]
    drafted = run_jobs(speculating(model, plain, 0.0, **settings), others, seed=2)
    first, second = (Counter(answer.token_ids[1] for answer in run.values()) for run in (plain, drafted))
    common = [token for token in first | second if first[token] + second[token] >= 10]
    chi_square = sum((first[token] - second[token]) ** 2 / (first[token] + second[token]) for token in common)
    assert chi_square < len(common) + 5 * (2 * len(common)) ** 0.5


def replace_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return msgspec.structs.replace(params, seed=seed)
