"""Custom logits processors: an operator's class edits the logits of requests that ask, and fails them alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LogitsProcessor
from quire.engine.core import EngineCore
from quire.types.errors import ConfigError
from quire.types.sampling import SamplingParams
from tests.e2e.drafting import assert_same, draft_always
from tests.e2e.tiny import Answer, Driver, make_engine, make_model
from tests.runner.engines import spy_on

NAME = "tests.runner.sampling.test_logits_processors:OnlyMultiples"


class OnlyMultiples(LogitsProcessor):
    """A request with extra_args {"multiples_of": n} may only say multiples of n, and nothing twice."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self.wanted: dict[int, int] = {}

    def add_request(self, row: int, params: SamplingParams, prompt_token_ids: list[int]) -> bool:
        wanted = (params.extra_args or {}).get("multiples_of")
        if wanted is not None:
            self.wanted[row] = int(wanted)
        return wanted is not None

    def remove_request(self, row: int) -> None:
        del self.wanted[row]

    def process(self, row: int, output_token_ids: list[int], logits: Tensor) -> None:
        if self.wanted[row] > 50 and len(output_token_ids) == 2:
            raise ValueError(f"{self.wanted[row]} is too many")
        keep = torch.zeros_like(logits, dtype=torch.bool)
        keep[:: self.wanted[row]] = True
        keep[output_token_ids] = False
        logits.masked_fill_(~keep, -torch.inf)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=1)


def params(**extra: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=1, extra_args=extra or None)


def test_requests_that_ask_are_edited_and_others_are_not(model: Path) -> None:
    plain = Driver(make_engine(model))
    plain.add("free", [5, 6, 7], params())
    expected = plain.finish()["free"].content()
    core = make_engine(model, logits_processors=[NAME])
    spy, driver = spy_on(core), Driver(core)
    for name, extra in (("seven", {"multiples_of": 7}), ("free", {}), ("many", {"multiples_of": 60})):
        driver.add(name, [5, 6, 7], params(**extra))
    answers = driver.finish()
    seven = answers["seven"].token_ids
    assert len(set(seven)) == 5
    assert all(token % 7 == 0 for token in seven)
    assert answers["free"].content() == expected
    assert answers["many"].error == "logits processor OnlyMultiples failed: ValueError: 60 is too many"
    assert all(shape.sampling.eager for shape in spy.ran)
    driver.add("later", [5, 6, 7], params())
    assert driver.finish()["later"].content() == expected
    assert not spy.ran[-1].sampling.eager, "rows that are free again ask for nothing"


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_memory": 12 << 10, "max_model_len": 48, "block_size": 16},
        {"speculative_config": {"method": "prediction", "num_speculative_tokens": 3}},
    ],
    ids=["preemption", "drafts"],
)
def test_rows_that_move_or_have_drafts_are_edited_alike(model: Path, settings: dict[str, Any]) -> None:
    def run(known: dict[str, Answer], **changed: Any) -> tuple[dict[str, Answer], EngineCore]:
        core = make_engine(model, logits_processors=[NAME], **changed)
        if "speculative_config" in changed:
            draft_always(core)
        driver = Driver(core)
        for row in range(4):
            asked = SamplingParams(
                temperature=0.0, max_tokens=20, ignore_eos=True, extra_args={"multiples_of": 3 + row}
            )
            predicted = known[str(row)].token_ids if known else []
            driver.add(str(row), [5, 6, 7] * 4, asked if row else params(), prediction=predicted)
        return driver.finish(), core

    expected, _ = run({})
    found, core = run(expected, **settings)
    assert_same(found, expected)
    stats = core.scheduler.stats()
    if "speculative_config" in settings:
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 3 * 12, "also of rows that are edited"
    else:
        assert stats.num_preemptions > 0


def test_what_fails_to_start_fails_alone(model: Path) -> None:
    core = make_engine(model, logits_processors=[NAME])
    driver = Driver(core)
    driver.add("bad", [5, 6], params(multiples_of="many"))
    driver.add("good", [5, 6], params(multiples_of=3))
    answers = driver.finish()
    assert "invalid literal for int()" in (answers["bad"].error or "")
    assert (answers["good"].error, len(answers["good"].token_ids)) == (None, 5)


@pytest.mark.parametrize("name", ["nowhere:Thing", "tests.e2e.tiny:Nothing", "tests.e2e.tiny:Driver", "tests"])
def test_what_cannot_be_loaded_is_refused_by_name(model: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"logits_processors has '{name}'"):
        make_engine(model, logits_processors=[name])
