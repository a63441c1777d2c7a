"""Whole recorded decode steps: greedy rows that only decode take them, and no token depends on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.engine.core import EngineCore
from quire.kernels.cpu import library
from quire.types.sampling import SamplingParams
from quire.types.step import StepPlan
from quire.worker.graphs import NoGraphs
from quire.worker.inproc import InProcExecutor
from quire.worker.recorded_decode import RecordedDecode
from quire.worker.runner import Runner
from tests.e2e.tiny import Driver, make_engine, make_model

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C++ compiler")

SLIDING: dict[str, Any] = {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}


def runner_of(core: EngineCore) -> Runner:
    assert isinstance(core.executor, InProcExecutor)
    return core.executor._worker.runner


class Counted:
    """Counts the steps that a recording ran."""

    def __init__(self, graphs: RecordedDecode) -> None:
        self.graphs, self.sizes = graphs, [0]

    def takes(self, plan: StepPlan) -> bool:
        return self.graphs.takes(plan)

    def run(self, plan: StepPlan) -> Any:
        self.sizes.append(len(plan.rows))
        return self.graphs.run(plan)


def answers(core: EngineCore, **params: Any) -> dict[str, object]:
    """Requests that leave one after the other, and one that arrives later."""
    driver = Driver(core)
    for index in range(5):
        prompt = [(3 + 7 * index + 5 * place) % 190 for place in range(1 + 9 * index)]
        given = SamplingParams(max_tokens=6 + 5 * index, ignore_eos=True, **params)
        driver.add(str(index), prompt, given)
        if index == 3:
            for _ in range(4):
                driver.step()
    return {name: answer.content() for name, answer in driver.finish().items()}


@pytest.mark.parametrize(
    ("model_type", "overrides", "is_recorded"),
    [("llama", {}, True), ("qwen2", SLIDING, True), ("gemma2", {}, True), ("olmo2", {}, False)],
)
def test_tokens_are_those_of_other_steps(
    model_type: str, overrides: dict[str, Any], is_recorded: bool, tmp_path: Path
) -> None:
    model = make_model(tmp_path, model_type, **overrides)
    core, other = make_engine(model), make_engine(model)
    graphs = runner_of(core).graphs
    assert isinstance(graphs, RecordedDecode)
    assert graphs.is_recorded == is_recorded
    counted = runner_of(core).graphs = Counted(graphs)
    runner_of(other).graphs = NoGraphs()
    assert answers(core, temperature=0.0) == answers(other, temperature=0.0)
    assert set(counted.sizes) == ({0, 1, 2, 3, 4, 5} if is_recorded else {0})


def test_draws_are_those_of_other_steps(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama")
    core, other = make_engine(model), make_engine(model)
    graphs = runner_of(core).graphs
    assert isinstance(graphs, RecordedDecode)
    counted = runner_of(core).graphs = Counted(graphs)
    runner_of(other).graphs = NoGraphs()
    params: dict[str, Any]
    for params in ({"temperature": 0.7}, {"temperature": 1.5, "top_p": 0.8, "min_p": 0.01}, {"top_k": 5}):
        assert answers(core, seed=1, **params) == answers(other, seed=1, **params)
    assert set(counted.sizes) == {0, 1, 2, 3, 4, 5}


def test_rows_that_ask_for_more_go_another_way(tmp_path: Path) -> None:
    core = make_engine(make_model(tmp_path, "llama"))
    graphs = runner_of(core).graphs
    assert isinstance(graphs, RecordedDecode)
    counted = runner_of(core).graphs = Counted(graphs)
    answers(core, temperature=0.7, seed=1, presence_penalty=0.5)
    answers(core, temperature=0.0, logprobs=1)
    answers(core, temperature=0.0, logit_bias={5: 2.0})
    answers(core, temperature=0.0, allowed_token_ids=[5, 6])
    answers(core, temperature=0.0, min_tokens=3)
    assert counted.sizes == [0]


def test_a_prompt_of_single_token_chunks_is_not_taken_for_decoding(tmp_path: Path) -> None:
    """A step of one token may also be a part of a prompt, after which more of it follows."""
    model = make_model(tmp_path, "llama")
    found = []
    for tokens in (1, 64):
        driver = Driver(make_engine(model, max_num_batched_tokens=tokens, max_num_seqs=1))
        driver.add("a", [5, 6, 7, 8, 9], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
        found.append(driver.finish()["a"].token_ids)
    assert found[0] == found[1]


def test_a_recording_leaves_the_rows_as_they_were(tmp_path: Path) -> None:
    runner = runner_of(make_engine(make_model(tmp_path, "llama")))
    rows = runner.rows
    assert int(rows.token_ids[rows.scratch_row, 0]) == 0
    assert rows.num_tokens.tolist() == rows.num_computed.tolist() == [0] * (rows.scratch_row + 1)
    for layer in runner.model.attention_layers():
        assert bool(layer.cache.float().isfinite().all())
