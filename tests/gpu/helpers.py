"""What tests of the whole engine on a GPU share: a tiny model, and random schedules to run it under."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.types.sampling import SamplingParams
from quire.types.structured import GrammarSource
from tests.e2e.tiny import VOCAB, Answer, Driver, make_engine, make_model
from tests.e2e.tiny_grammar import VOCABULARY, regex
from tests.kernels.device import NATIVE

needs_gpu = pytest.mark.skipif(not NATIVE, reason="needs a GPU, and QUIRE_TEST_GPU=1")

# Matmuls and heads of sizes that kernels have fast paths for, and few enough blocks that requests are preempted.
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
SMALL_CACHE = 1 << 20
ROOMY_CACHE = 64 << 20


def tiny_model(folder: Path) -> Path:
    return make_model(folder, "qwen3", **SIZES)


@dataclass(frozen=True)
class Job:
    name: str
    token_ids: list[int]
    params: SamplingParams
    grammar: GrammarSource | None = None


def make_jobs(count: int, seed: int = 0, longest: int = 400) -> list[Job]:
    """Requests that share prefixes, some greedy and some drawn, most with log-probabilities."""
    rng, limits = random.Random(seed), random.Random(~seed)
    stem = [rng.randrange(3, VOCAB) for _ in range(longest)]
    jobs = []
    for index in range(count):
        own = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 60))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.8]),
            seed=index,
            top_k=limits.choice([0, 0, 5, 100]),
            top_p=limits.choice([1.0, 1.0, 0.8]),
            min_p=limits.choice([0.0, 0.0, 0.05]),
            max_tokens=rng.randint(1, 24),
            logprobs=rng.choice([None, 2]),
            ignore_eos=True,
        )
        jobs.append(Job(str(index), [*stem[: rng.choice([0, 0, 16, 100, longest])], *own], params))
    return jobs


def constrained(jobs: list[Job]) -> list[Job]:
    """The same requests, two of three of them under a grammar that most never come to the end of."""
    patterns = [
        r"[a-z ]{2,30}",
        None,
        r"(0|[1-9][0-9]{0,5};)*",
        r"\{[a-z]{1,6}: ([0-9]+|[A-Z]{2,8})\}",
        None,
        r"x?y{3,}",
    ]
    return [
        job if pattern is None else replace(job, grammar=regex(pattern))
        for job, pattern in zip(jobs, cycle(patterns), strict=False)
    ]


def shaped(jobs: list[Job]) -> list[Job]:
    """The same requests, most of them with something else that changes their logits."""
    changes: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"logit_bias": {7: 4.0, 11: -3.5, 190: 2.0}},
        {},
        {"frequency_penalty": 0.4, "presence_penalty": -0.2, "logprobs": 5},
        {"bad_words_token_ids": ((60,), (35, 36), (70, 71, 72))},
        {"allowed_token_ids": [*range(30, 120)]},
        {"min_tokens": 6, "max_tokens": 20, "stop_token_ids": [*range(40, 60)], "ignore_eos": False},
        {"allowed_token_ids": [*range(30, 125)], "repetition_penalty": 0.8, "logit_bias": {40: 1.0}, "logprobs": 0},
    ]
    return [
        replace(job, params=msgspec.structs.replace(job.params, **change))
        for job, change in zip(jobs, cycle(changes), strict=False)
    ]


def run_jobs(core: Any, jobs: Iterable[Job], seed: int, aborted: Iterable[str] = ()) -> dict[str, Answer]:
    """Submit in a random order at random steps; those to be aborted are, some steps after they came."""
    rng = random.Random(seed)
    waiting, driver, doomed = list(jobs), Driver(core), set(aborted)
    rng.shuffle(waiting)
    while waiting or core.has_unfinished():
        for _ in range(rng.choice([0, 0, 1, 3, 20])):
            if waiting:
                job = waiting.pop()
                driver.add(job.name, job.token_ids, job.params, grammar=job.grammar)
        going = [name for name in doomed if name in driver.answers]
        if going and rng.random() < 0.3:
            doomed.remove(going[0])
            core.abort([going[0]])
        driver.step()
    return driver.answers


def engine(model: Path, **settings: Any) -> Any:
    core = make_engine(model, **{"device": "cuda", "max_model_len": 1024, **settings})
    core.constraints.set_vocabulary(VOCABULARY)
    return core
