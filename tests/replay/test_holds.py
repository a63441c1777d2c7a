"""Runs in which an operator puts the engine to sleep, wakes it or updates its weights, at recorded moments."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.cli.main import main
from quire.config.engine import EngineConfig
from quire.engine.build import build_engine
from quire.engine.loop import EngineLoop
from quire.engine.trace.records import Ready
from quire.replay.trace import Trace
from quire.types.control import WeightsUpdate
from quire.types.messages import AbortRequests, Command
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from tests.e2e.tiny import make_model


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay chooses the kernels of its process."""
    monkeypatch.setenv("QUIRE_CPU_ISA", "")


def request(name: str) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        token_ids=[ord(character) for character in name * 5],
        params=SamplingParams(max_tokens=30, ignore_eos=True),
        max_tokens=30,
    )


@pytest.mark.parametrize("depth", [1, 3])
def test_changes_are_replayed_when_they_were_done(
    tmp_path: Path, depth: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with steps in flight that a change waits for, and with requests that come and go meanwhile."""
    model, path = make_model(tmp_path / "llama", "llama"), tmp_path / "trace"
    config = EngineConfig.from_flat(model=str(model), num_threads=2, steps_in_flight=depth, trace=str(path))
    core, _, _ = build_engine(config)
    loop = EngineLoop(core)

    def steps(count: int) -> None:
        for _ in range(count):
            loop.run_once()

    loop.submit(request("a"))
    steps(4)
    loop.submit(Command(0, "sleep", 1))
    loop.submit(request("b"))
    steps(2)
    loop.submit(AbortRequests(["c"]))
    steps(1)
    while core.hold._work is not None:
        loop.run_once()
    loop.submit(Command(1, "wake"))
    loop.submit(request("d"))
    while core.hold.is_active:
        loop.run_once()
    steps(5)
    loop.submit(Command(2, "update_weights", WeightsUpdate(str(model), "continue")))
    steps(1)
    while loop.has_unfinished():
        loop.run_once()
    loop.shutdown()
    changes = [r.condition for r in Trace(path).records() if isinstance(r, Ready)]
    assert changes == ["sleep", "wake", "update_weights"]
    assert main(["replay", str(path)]) == 0
    assert capsys.readouterr().out.startswith("EQUAL: ")
