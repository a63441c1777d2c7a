"""Recorded forward passes: where a model's steps can be recorded they are, and no token depends on it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from torch import Tensor

from quire.engine.core import EngineCore
from quire.kernels.cpu import library
from quire.types.sampling import SamplingParams
from quire.worker.graphs import NoForwardGraphs, NoGraphs
from quire.worker.inproc import InProcExecutor
from quire.worker.input_batch import InputBatch
from quire.worker.recorded_forward import RecordedForward
from quire.worker.runner import Runner
from tests.e2e.tiny import Driver, make_engine, make_model

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C++ compiler")


def runner_of(core: EngineCore) -> Runner:
    assert isinstance(core.executor, InProcExecutor)
    return core.executor._worker.runner


def answers(core: EngineCore) -> dict[str, object]:
    """Prompts of all lengths that arrive together, so that steps hold chunks, whole prompts and single tokens."""
    rng = random.Random(0)
    driver = Driver(core)
    for index in range(6):
        prompt = [rng.randrange(1, 60) for _ in range(rng.choice((1, 3, 20, 45)))]
        params = SamplingParams(temperature=0.0, max_tokens=3 + 4 * index, ignore_eos=True, logprobs=1)
        driver.add(str(index), prompt, params)
    return {name: answer.content() for name, answer in driver.finish().items()}


@pytest.mark.parametrize(
    ("model_type", "is_recorded"),
    [("llama", True), ("qwen3", True), ("gemma2", True), ("granite", True), ("olmo2", False)],
)
def test_tokens_and_logprobs_are_those_of_launched_steps(model_type: str, is_recorded: bool, tmp_path: Path) -> None:
    model = make_model(tmp_path, model_type)
    core, launched = (make_engine(model, max_num_batched_tokens=32) for _ in range(2))
    forward = runner_of(core).forward_graphs
    assert isinstance(forward, RecordedForward)
    assert forward.is_recorded == is_recorded
    runner_of(launched).graphs = NoGraphs()
    runner_of(launched).forward_graphs = NoForwardGraphs()
    assert answers(core) == answers(launched)


def test_a_replay_gives_the_bits_of_the_model_at_every_size(tmp_path: Path) -> None:
    core, launched = (make_engine(make_model(tmp_path, "llama"), max_num_batched_tokens=64) for _ in range(2))
    runner_of(launched).graphs = NoGraphs()
    runner_of(launched).forward_graphs = NoForwardGraphs()
    for length in (1, 2, 11, 12, 13, 31, 63):
        prompts = [[(7 * i + length) % 60 for i in range(length)], [1, 2, 3]]
        found = []
        for engine in (core, launched):
            driver = Driver(engine)
            for index, prompt in enumerate(prompts):
                params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=3)
                driver.add(f"{length}-{index}", prompt, params)
            found.append({name: answer.content() for name, answer in driver.finish().items()})
        assert found[0] == found[1]


class Counted(RecordedForward):
    """Counts the steps that it is asked for and those that it ran."""

    asked = ran = 0

    def run(self, batch: InputBatch) -> Tensor | None:
        hidden = super().run(batch)
        self.asked += 1
        self.ran += hidden is not None
        return hidden


def test_steps_whose_tokens_are_all_wanted_are_launched(tmp_path: Path) -> None:
    """A recording computes the last layer for the tokens that are sampled from, and a chunk may have none."""
    core = make_engine(make_model(tmp_path, "llama"), max_num_batched_tokens=16)
    forward = runner_of(core).forward_graphs
    assert isinstance(forward, RecordedForward)
    forward.__class__ = Counted
    assert isinstance(forward, Counted)
    driver = Driver(core)
    prompt = [(7 * i) % 60 for i in range(40)]
    driver.add("a", prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    driver.finish()
    assert (forward.asked, forward.ran) == (3, 3)
    driver.add("b", prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=1))
    driver.finish()
    assert (forward.asked, forward.ran) == (6, 3)


def test_a_recording_leaves_nothing_behind(tmp_path: Path) -> None:
    """Tables are empty again, and whatever lies in the blocks it used is finite."""
    runner = runner_of(make_engine(make_model(tmp_path, "llama")))
    assert int(runner.tables.tables.count_nonzero()) == 0
    for layer in runner.model.attention_layers():
        assert bool(layer.cache.float().isfinite().all())


def test_an_engine_with_room_for_a_few_tokens_records_nothing(tmp_path: Path) -> None:
    core = make_engine(make_model(tmp_path, "llama"), max_model_len=8)
    assert isinstance(runner_of(core).forward_graphs, NoForwardGraphs)
    driver = Driver(core)
    driver.add("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    assert len(driver.finish()["a"].token_ids) == 4
