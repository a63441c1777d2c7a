"""Tokens that a grammar forces are drafts without any setting, and change no token of anybody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.engine.core import EngineCore
from quire.structured.manager import GrammarManager
from quire.structured.sources import make_source
from quire.types.sampling import SamplingParams
from quire.types.structured import StructuredOutputsParams
from tests.e2e.drafting import Counting, assert_same, draft_always, engine
from tests.e2e.tiny import Answer, Driver, make_model
from tests.e2e.tiny_grammar import text_of

SCHEMA = {
    "type": "object",
    "properties": {
        "identification": {"type": "integer", "minimum": 1, "maximum": 9},
        "is_confirmed": {"type": "boolean"},
    },
    "required": ["identification", "is_confirmed"],
    "additionalProperties": False,
}
GRAMMAR = make_source(StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True))
OFF = {"method": "none"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("jump_forward") / "llama", "llama")


def run(core: EngineCore, num_rows: int = 3, **params: Any) -> tuple[dict[str, Answer], Counting]:
    """Requests under the schema, each beside one without a grammar."""
    counted, driver = Counting(core), Driver(core)
    for index in range(num_rows):
        asked = {"temperature": 0.9 * (index % 2), "seed": index, "max_tokens": 60, "logprobs": 2, **params}
        driver.add(f"json {index}", [5, 6, 7 + index], SamplingParams(**asked), grammar=GRAMMAR)
        driver.add(f"text {index}", [5, 6, 7 + index], SamplingParams(ignore_eos=True, **asked))
        driver.step()
    return driver.finish(), counted


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Answer]:
    answers, counted = run(engine(model, speculative_config=OFF))
    assert counted.num_drafts == 0
    assert text_of(answers["json 0"].token_ids).startswith('{"identification":')
    return answers


@pytest.mark.parametrize("depth", [1, 2])
def test_keys_are_drafted_without_a_setting(
    model: Path, expected: dict[str, Answer], depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced = GrammarManager.forced

    def found(self: GrammarManager, request_id: str) -> tuple[int, list[int]]:
        """Steps of so small a model would not wait for what is found on another thread."""
        if self._looking is not None:
            self._looking.result()
        return forced(self, request_id)

    monkeypatch.setattr(GrammarManager, "forced", found)
    core = engine(model, steps_in_flight=depth)
    draft_always(core)
    answers, counted = run(core)
    assert_same(answers, expected)
    assert counted.num_accepted == counted.num_drafts > 60, "each character is a token, which has no alternative"
    assert counted.rejected == set()


def test_a_lone_request_needs_fewer_steps(model: Path) -> None:
    found = {}
    for setting in (None, OFF):
        core = engine(model, speculative_config=setting)
        if setting is None:
            draft_always(core)
        driver, counted = Driver(core), Counting(core)
        driver.add("a", [5, 6, 7], SamplingParams(max_tokens=60, temperature=0.0), grammar=GRAMMAR)
        found[setting is None] = driver.finish()["a"].content(), counted.num_steps
    assert found[True][0] == found[False][0]
    assert found[True][1] < found[False][1] / 2


def test_the_measured_lengths_change_nothing(model: Path, expected: dict[str, Answer]) -> None:
    answers, _ = run(engine(model))
    assert_same(answers, expected)


def test_requests_without_a_grammar_have_no_drafter(model: Path) -> None:
    core = engine(model)
    driver = Driver(core)
    driver.add("text", [5, 6, 7], SamplingParams(max_tokens=9, ignore_eos=True))
    driver.step()
    drafting: Any = core.scheduler.state.drafting
    assert drafting._requests == {}


@pytest.mark.parametrize(("setting", "asked"), [(OFF, {}), (None, {"speculate": False})])
def test_it_can_be_turned_off(model: Path, setting: dict[str, Any] | None, asked: dict[str, Any]) -> None:
    _, counted = run(engine(model, speculative_config=setting), num_rows=1, **asked)
    assert counted.num_drafts == 0
