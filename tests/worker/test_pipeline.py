"""Pipeline stages in processes: the bits of one process, batches in flight, and an end when a stage is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.config.engine import EngineConfig
from quire.engine.core import EngineCore
from quire.planning.engine_plan import plan_memory
from quire.types.errors import ConfigError, EngineDeadError
from quire.types.sampling import SamplingParams
from quire.types.step import StepPlan
from quire.worker.rank_messages import Execute
from quire.worker.ring import NOTICE
from tests.corpus.requests import corpus_jobs
from tests.e2e.test_lora import answers, make_adapter, mixed
from tests.e2e.tiny import RECURRENT, Answer, Driver, make_engine, make_model, run_all
from tests.e2e.tiny_grammar import VOCABULARY
from tests.gpu.helpers import make_jobs, run_jobs
from tests.worker.rank_changes import check_changes
from tests.worker.steps_ahead import check_steps_ahead
from tests.worker.test_multiproc import LIMIT, LORA, assert_alike, assert_serves, executor_of, is_alive

SETTINGS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 96}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def assert_equal(found: dict[str, Answer], expected: dict[str, Answer]) -> None:
    for name, answer in expected.items():
        assert found[name].content() == answer.content(), name
        assert found[name].prompt_logprobs == answer.prompt_logprobs, name


@contextmanager
def engine(model: Path, **settings: Any) -> Iterator[EngineCore]:
    core = make_engine(model, **SETTINGS | settings)
    core.constraints.set_vocabulary(VOCABULARY)
    try:
        yield core
    finally:
        core.shutdown()


def run(model: Path, jobs: Any, **settings: Any) -> dict[str, Answer]:
    with engine(model, **settings) as core:
        return run_jobs(core, jobs, seed=1)


def fail(core: EngineCore, rank: int) -> None:
    """Have a rank raise before its next step."""
    bad = msgspec.msgpack.encode(Execute(StepPlan(10_000_001, [999], [5])))
    executor_of(core).ranks[rank].send(NOTICE.pack(-1, len(bad), 0) + bad)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("stages") / "base", "llama", max_position_embeddings=1024)


@pytest.fixture(scope="module")
def two_stages(model: Path) -> Iterator[EngineCore]:
    core = make_engine(model, pipeline_parallel_size=2, **SETTINGS, **LORA)
    core.constraints.set_vocabulary(VOCABULARY)
    yield core
    pids = [process.pid for process in executor_of(core).ranks]
    core.shutdown()
    assert not any(map(is_alive, pids))


def test_two_stages_give_the_bits_of_one(two_stages: EngineCore, model: Path) -> None:
    """With grammars, log-probabilities of outputs and prompts, penalties, and prefix hits."""
    expected = run(model, corpus_jobs(), **LORA)
    assert any(answer.num_cached_tokens for answer in expected.values())
    assert_equal(run_jobs(two_stages, corpus_jobs(), seed=1), expected)


def test_two_stages_serve_adapters(two_stages: EngineCore, model: Path) -> None:
    adapters = [make_adapter(model, model.parent / name, seed) for seed, name in enumerate(("first", "second"))]
    expected = answers(model, mixed(adapters), lora_dtype="auto")
    assert_equal(run_all(two_stages, mixed(adapters)), expected)


def test_two_stages_sleep_and_change_their_weights(two_stages: EngineCore, model: Path) -> None:
    check_changes(two_stages, model)


def test_requests_that_decode_are_shared_by_the_steps_in_flight(two_stages: EngineCore) -> None:
    driver = Driver(two_stages)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    for name in "abcd":
        driver.add(name, [5, 6, 7], params)
    seen: list[list[int]] = []
    while two_stages.has_work():
        driver.step()
        seen.append([len(step.plan.rows) for step in two_stages.scheduler.state.in_flight])
    # Steps come back one at a time, so that two stay in flight, each with half of the rows.
    assert seen.count([2, 2]) > 20, seen


def test_a_step_that_fails_in_one_stage_is_contained(two_stages: EngineCore) -> None:
    """The other does not wait for it."""
    for rank in (0, 1):
        driver = Driver(two_stages)
        driver.add("a", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
        driver.step()
        fail(two_stages, rank)
        answer = driver.finish()["a"]
        assert (len(answer.token_ids), answer.error) == (40, None)
        assert_serves(two_stages)


def test_several_steps_of_one_request_are_in_flight_through_two_stages(two_stages: EngineCore, model: Path) -> None:
    with engine(model, **LORA) as one:
        check_steps_ahead(two_stages, one, partial(fail, two_stages), num_stages=2)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_stage_that_is_lost_fails_the_engine(model: Path, rank: int) -> None:
    core = make_engine(model, pipeline_parallel_size=2, **SETTINGS)
    processes = executor_of(core).ranks
    driver = Driver(core)
    driver.add("a", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True))
    driver.step()
    os.kill(processes[rank].pid, signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(EngineDeadError, match=f"rank {rank} .*was killed by SIGKILL"):
        driver.finish()
    assert time.monotonic() - begin < LIMIT
    core.shutdown()
    assert not any(is_alive(process.pid) for process in processes)


def test_two_ranks_in_each_of_two_stages_give_the_tokens_of_one(model: Path) -> None:
    """Long steps by rows: whole ones are handed on."""
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "sequence_parallel_threshold": 19}
    assert_alike(run(model, corpus_jobs(), **sizes), run(model, corpus_jobs()))


KINDS: dict[str, dict[str, Any]] = {
    "recurrent": {"model_type": "qwen3_next", "num_experts": 4, "num_experts_per_tok": 2, **RECURRENT},
    "windows": {"model_type": "gemma2", "query_pre_attn_scalar": 16, "sliding_window": 24},
    "experts": {"model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "int8": {"model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "quantization": "int8"},
    "drafts": {"model_type": "llama", "speculative_config": NGRAM},
}


NIGHTLY = [pytest.param(kind, marks=pytest.mark.nightly) for kind in ("windows", "experts", "int8")]


@pytest.mark.parametrize("kind", ["recurrent", "drafts", *NIGHTLY])
def test_three_stages_of_every_kind_of_layer(kind: str, tmp_path: Path) -> None:
    sizes = dict(KINDS[kind])
    settings = {name: sizes.pop(name) for name in ("quantization", "speculative_config") if name in sizes}
    model, jobs = make_model(tmp_path / "model", **sizes), make_jobs(16, longest=100)
    settings |= {"max_model_len": 256}
    with engine(model, pipeline_parallel_size=3, **settings) as three, engine(model, **settings) as one:
        assert_equal(run_jobs(three, jobs, seed=1), run_jobs(one, jobs, seed=1))
        if kind == "recurrent":
            check_steps_ahead(three, one, partial(fail, three), num_stages=3)


def test_a_number_of_stages_that_layers_do_not_allow_names_those_that_they_do(model: Path) -> None:
    config = EngineConfig.from_flat(model=str(model), pipeline_parallel_size=5, **SETTINGS)
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 5, but the model has 4 layers; it takes 1 to 4"):
        plan_memory(config)
