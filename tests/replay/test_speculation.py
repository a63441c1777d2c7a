"""Runs that speculate under grammars: what a grammar forces is found on another thread, so traces keep it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from quire.config.engine import EngineConfig
from quire.engine.build import build_engine
from quire.engine.loop import EngineLoop
from quire.engine.trace.records import Finished, Planned, Took
from quire.replay.trace import Trace
from quire.structured.manager import GrammarManager
from quire.structured.sources import make_source
from quire.types.messages import Command
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from quire.types.structured import GrammarSource, StructuredOutputsParams
from tests.e2e.tiny import make_model
from tests.e2e.tiny_grammar import VOCABULARY, regex, text_of

SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 4}
SCHEMA = {
    "type": "object",
    "properties": {"temperature": {"enum": ["low", "lower"]}, "number": {"type": "integer", "maximum": 99}},
    "required": ["temperature", "number"],
    "additionalProperties": False,
}


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay chooses the kernels of its process."""
    monkeypatch.setenv("QUIRE_CPU_ISA", "")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("replay") / "llama", "llama")


def request(index: int, draw: random.Random) -> EngineRequest:
    """With a schema, a regular expression that repeats itself, or nothing."""
    sources: list[GrammarSource | None] = [
        make_source(StructuredOutputsParams(json=SCHEMA)),
        regex("(abc, ){5}[0-9]{4}"),
        None,
    ]
    params = SamplingParams(max_tokens=60, temperature=draw.choice([0.0, 0.8]), ignore_eos=True)
    return EngineRequest(
        request_id=f"r{index}",
        token_ids=[draw.randrange(40, 46) for _ in range(draw.randint(2, 12))],
        params=params,
        seed=draw.getrandbits(40),
        max_tokens=60,
        eos_token_ids=(2,),
        grammar=sources[index % 3],
    )


def record(model: Path, path: Path, seed: int, **settings: Any) -> dict[str, list[int]]:
    """Run requests that come at random steps; what each was given."""
    draw = random.Random(seed)
    core, _, _ = build_engine(
        EngineConfig.from_flat(
            model=str(model),
            num_threads=2,
            steps_in_flight=2,
            speculative_config=SPECULATIVE,
            trace=str(path),
            **settings,
        )
    )
    loop = EngineLoop(core)
    loop.submit(Command(0, "set_vocabulary", VOCABULARY))
    arrivals = [request(index, draw) for index in range(9)]
    given: dict[str, list[int]] = {one.request_id: [] for one in arrivals}
    while arrivals or loop.has_unfinished():
        if arrivals and (draw.random() < 0.3 or not loop.has_unfinished()):
            loop.submit(arrivals.pop(0))
        for output in loop.run_once().outputs:
            assert output.error is None
            given[output.request_id] += output.token_ids
    loop.shutdown()
    return given


@pytest.mark.parametrize("seed", range(3))
def test_a_run_with_forced_tokens_is_replayed_to_the_same_hash(
    model: Path, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The thread that looks ahead is late at random, as it is beside a busy engine."""
    path, draw, found = tmp_path / "trace", random.Random(seed), GrammarManager.forced

    def forced(self: GrammarManager, request_id: str) -> tuple[int, list[int]]:
        return found(self, request_id) if draw.random() < 0.5 else (0, [])

    with monkeypatch.context() as patch:
        patch.setattr(GrammarManager, "forced", forced)
        given = record(model, path, seed)
    assert text_of(given["r0"]).replace(" ", "").startswith('{"temperature":"low')
    records = list(Trace(path).records())
    plans = [one for one in records if isinstance(one, Planned)]
    assert any(one.forced for one in plans)
    assert main(["replay", str(path)]) == 0
    last = [one.rolling for one in records if isinstance(one, Finished)][-1].hex()
    assert f"hash {last}" in capsys.readouterr().out


def test_a_redacted_trace_has_no_forced_tokens(model: Path, tmp_path: Path) -> None:
    record(model, tmp_path / "trace", 0, trace_redact=True)
    records = list(Trace(tmp_path / "trace").records())
    assert not any(one.forced for one in records if isinstance(one, Planned))
    assert not any(isinstance(one, Took) for one in records)
