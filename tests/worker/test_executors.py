"""An executor is one file and one registry line: a worker in another process gives the same, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.engine.build import build_engine
from quire.engine.core import EngineCore
from quire.types.errors import EngineDeadError, UnknownNameError
from quire.types.sampling import SamplingParams
from quire.types.step import StepPlan
from quire.worker.registry import EXECUTORS
from tests.corpus.requests import corpus_jobs
from tests.e2e.tiny import Driver, make_engine, make_model
from tests.e2e.tiny_grammar import VOCABULARY
from tests.gpu.helpers import run_jobs
from tests.worker.pipe_executor import PipeExecutor

SETTINGS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 96}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("executors") / "model", "llama", max_position_embeddings=1024)


@pytest.fixture(scope="module")
def core(model: Path) -> Iterator[EngineCore]:
    EXECUTORS.register("pipe", "tests.worker.pipe_executor:PipeExecutor")
    config = EngineConfig.from_flat(model=str(model), steps_in_flight=2, **SETTINGS)
    core, info, _ = build_engine(config, executor_name="pipe")
    assert info.vocab_size == len(VOCABULARY.pieces)
    core.constraints.set_vocabulary(VOCABULARY)
    yield core
    core.shutdown()
    assert isinstance(core.executor, PipeExecutor)
    assert core.executor.process.exitcode == 0


def test_a_worker_behind_a_pipe_gives_the_same(core: EngineCore, model: Path) -> None:
    here = make_engine(model, steps_in_flight=1, **SETTINGS)
    here.constraints.set_vocabulary(VOCABULARY)
    expected = run_jobs(here, corpus_jobs(), seed=1)
    assert {answer.finish_reason for answer in expected.values()} == {"length", "stop"}
    description = here.executor.description
    here.shutdown()
    found = run_jobs(core, corpus_jobs(), seed=2)
    for name, answer in expected.items():
        assert found[name].content() == answer.content(), name
        assert found[name].prompt_logprobs == answer.prompt_logprobs, name
    told = core.executor.description
    assert (told.step_sizes, told.step_times) == (description.step_sizes, description.step_times)
    assert told.ledger.layout == description.ledger.layout


def test_a_step_that_fails_there_is_contained_here(core: EngineCore) -> None:
    failing = core.executor.execute(StepPlan(10_000_000, [999], [5]))
    error = failing.exception()
    assert isinstance(error, Exception)
    assert not core.executor.is_sticky(error)
    assert isinstance(core.capture_next(), bool)
    driver = Driver(core)
    driver.add("after", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=3))
    answer = driver.finish()["after"]
    assert (len(answer.token_ids), answer.error) == (3, None)


def test_an_unknown_executor_is_named(model: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown executor 'carrier pigeon'"):
        build_engine(EngineConfig.from_flat(model=str(model), **SETTINGS), executor_name="carrier pigeon")


@pytest.mark.nightly
def test_a_worker_that_dies_ends_the_engine(model: Path) -> None:
    EXECUTORS.register("pipe", "tests.worker.pipe_executor:PipeExecutor")
    core, _, _ = build_engine(EngineConfig.from_flat(model=str(model), **SETTINGS), executor_name="pipe")
    assert isinstance(core.executor, PipeExecutor)
    driver = Driver(core)
    driver.add("a", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True))
    driver.step()
    core.executor.process.kill()
    core.executor.process.join(60)
    with pytest.raises(EngineDeadError, match="the worker is gone"):
        driver.finish()
    core.shutdown()
