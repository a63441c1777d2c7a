"""Recorded decode steps: where a model's steps can be recorded they are, and no token depends on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.engine.core import EngineCore
from quire.kernels.cpu import library
from quire.types.sampling import SamplingParams
from quire.worker import recorded_decode
from quire.worker.inproc import InProcExecutor
from quire.worker.recorded_decode import RecordedDecode
from tests.e2e.tiny import Driver, make_engine, make_model

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C++ compiler")

PROMPTS = [[3, 5, 7], [11, 13, 17, 19, 23], [2] * 9]


def graphs_of(core: EngineCore) -> RecordedDecode:
    assert isinstance(core.executor, InProcExecutor)
    graphs = core.executor._worker.runner.mixed_graphs
    assert isinstance(graphs, RecordedDecode)
    return graphs


def answers(core: EngineCore, count: int) -> dict[str, object]:
    driver = Driver(core)
    for index in range(count):
        length = 6 + 5 * index  # rows leave one after the other, so that several sizes are recorded
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, logprobs=1)
        driver.add(str(index), PROMPTS[index % len(PROMPTS)], params)
    return {name: answer.content() for name, answer in driver.finish().items()}


@pytest.mark.parametrize(("model_type", "is_recorded"), [("llama", True), ("qwen3", True), ("gemma2", False)])
def test_tokens_and_logprobs_are_those_of_launched_steps(
    model_type: str, is_recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path, model_type)
    core = make_engine(model)
    recorded = answers(core, 5)
    sizes = set(graphs_of(core)._recordings)
    assert sizes == ({1, 2, 3, 4, 5} if is_recorded else set())
    monkeypatch.setattr(recorded_decode, "MAX_ROWS", 0)
    assert answers(make_engine(model), 5) == recorded
