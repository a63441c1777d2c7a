"""Host drafters through the scheduler: streams are those of no speculation, whatever happens meanwhile."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest

import tests.fakes
from quire.config.groups import SpeculativeConfig
from quire.kv.layout import LayerKV
from quire.sched.drafters.registry import make_drafting
from quire.sched.drafts import Drafts, NoDrafts
from quire.sched.step_times import StepTimes
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from tests.e2e.covering import covering_rows
from tests.fakes import VOCAB_SIZE, generate_alone
from tests.sched.driver import Driver, make_request

METHODS = ("off", "ngram", "suffix", "prediction", "draft_model")
MAX_LEN = 64


@pytest.fixture(autouse=True)
def _repetitive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake model that repeats itself now and then, so that guesses from what was said come true."""

    def next_token(token_ids: Sequence[int], vocab_size: int = VOCAB_SIZE) -> int:
        return hash((0, *token_ids[-2:], len(token_ids) % 23 == 0)) % 7

    monkeypatch.setattr(tests.fakes, "next_token", next_token)


def no_forced(request_id: str) -> tuple[int, list[int]]:
    return 0, []


def drafting_of(method: str, *, every: bool = True) -> NoDrafts:
    if method == "off":
        return NoDrafts()
    drafting = make_drafting(SpeculativeConfig(method=method), StepTimes(), no_forced)
    if every:  # what the lengths would choose depends on times
        assert isinstance(drafting, Drafts)
        return Drafts(*drafting._drafters)
    return drafting


FACTORS = {
    "speculation": METHODS,
    "depth": (1, 2, 3),
    "stages": (1, 3),
    "window": (False, True),
    "memory": ("plenty", "short"),
    "prefix_caching": (False, True),
    "ends": ("length", "stop", "model_len"),
    "trouble": ("none", "aborts", "failures", "stalls"),
    "lengths": ("every", "measured"),
}


def make_requests(draw: random.Random, ends: str, wants_logprobs: bool) -> list[EngineRequest]:
    shared = [draw.randrange(7) for _ in range(8)]
    requests = []
    for index in range(6):
        prompt = shared[: draw.randint(0, 8)] + [draw.randrange(7) for _ in range(draw.randint(1, 10))]
        params = SamplingParams(
            max_tokens=None,
            min_tokens=draw.choice([0, 5]) if ends == "stop" else 0,
            stop_token_ids=(3,) if ends == "stop" and index % 2 else (),
            logprobs=0 if wants_logprobs else None,
            speculate=index != 4,
        )
        request = make_request(
            str(index),
            prompt,
            500 if ends == "model_len" else draw.randint(1, 40),
            params,
            eos_token_ids=(6,) if ends == "stop" else (),
            tenant=draw.choice(["a", "b"]),
        )
        predicted = generate_alone(request, MAX_LEN)[0]
        if predicted and draw.random() < 0.8:
            predicted[draw.randrange(len(predicted))] = 40
        requests.append(make_request_with(request, predicted))
    return requests


def make_request_with(request: EngineRequest, prediction: list[int]) -> EngineRequest:
    return msgspec.structs.replace(request, prediction=prediction)


def run(row: dict[str, object], seed: int) -> Driver:
    draw = random.Random(seed)
    layers = [LayerKV("full", None, 1), *([LayerKV("sliding", 5, 1)] * 2 if row["window"] else [])]
    driver = Driver(
        layers=layers,
        num_blocks=60 if row["memory"] == "short" else 400,
        max_num_seqs=4,
        budget=24,
        max_model_len=MAX_LEN,
        depth=int(str(row["depth"])),
        num_stages=int(str(row["stages"])),
        prefix_caching=bool(row["prefix_caching"]),
        drafting=drafting_of(str(row["speculation"]), every=row["lengths"] == "every"),
    )
    trouble = row["trouble"]
    driver.executor.stalling = 0.1 if trouble == "stalls" else 0.0
    requests = make_requests(draw, str(row["ends"]), wants_logprobs=seed % 2 == 0)
    driver.add(*requests)
    for step in range(30):
        if not driver.scheduler.has_unfinished:
            break
        driver.step()
        if trouble == "failures" and driver.in_flight and draw.random() < 0.2:
            driver.finish(fail=True, apply_before_failing=draw.random() < 0.5)
        if trouble == "aborts" and step == 5:
            driver.abort("2")
        if step % 7 == 3 and row["memory"] == "short":
            driver.preempt_last()
    driver.run()
    for request in requests:
        found = driver.ending(request.request_id)
        if found[1] == "abort":
            continue
        expected = generate_alone(request, MAX_LEN)
        assert found == expected
        if seed % 2 == 0:
            told = [entry for output in driver.outputs[request.request_id] for entry in output.logprobs or []]
            assert len(told) == len(expected[0])
        assert request.params.speculate or not any(  # type: ignore[union-attr]
            output.num_accepted_predictions for output in driver.outputs[request.request_id]
        )
    return driver


ROWS = covering_rows(FACTORS)


@pytest.mark.parametrize("part", range(8))
def test_streams_are_those_of_no_speculation(part: int) -> None:
    for seed, row in enumerate(ROWS):
        if seed % 8 == part:
            driver = run(row, seed)
            assert row["speculation"] != "off" or not driver.executor.num_drafts


@pytest.mark.parametrize("method", METHODS[1:])
def test_the_guesses_come_true(method: str) -> None:
    """Else the rows above would compare nothing."""
    row = {name: values[0] for name, values in FACTORS.items()} | {"speculation": method}
    drivers = [run(row, seed) for seed in range(4)]
    accepted = sum(driver.executor.num_accepted for driver in drivers)
    drafted = sum(driver.executor.num_drafts for driver in drivers)
    assert 20 < accepted < drafted
    counts = drivers[0].scheduler.stats()
    assert counts.num_draft_tokens == drivers[0].executor.num_drafts
    assert counts.num_accepted_tokens == sum(counts.accepted_per_position) == drivers[0].executor.num_accepted
    assert list(counts.accepted_per_position) == sorted(counts.accepted_per_position, reverse=True)


def test_a_prediction_needs_no_settings_and_is_counted() -> None:
    request = make_request("a", [1, 2, 3], 30)
    outputs, *_ = generate_alone(request, MAX_LEN)
    wrong = [*outputs[:10], 41, *outputs[11:]]
    driver = Driver(drafting=make_drafting(None, StepTimes(), no_forced))
    driver.add(make_request("a", [1, 2, 3], 30, prediction=wrong), make_request("b", [1, 2, 4], 30))
    driver.run()
    assert driver.tokens("a") == outputs
    accepted = sum(output.num_accepted_predictions for output in driver.outputs["a"])
    rejected = sum(output.num_rejected_predictions for output in driver.outputs["a"])
    assert accepted == driver.executor.num_accepted > 5
    assert rejected == driver.executor.num_drafts - accepted
    assert not any(output.num_accepted_predictions for output in driver.outputs["b"])
    assert driver.scheduler._state.drafting._requests == {}  # type: ignore[attr-defined]


def test_drafts_of_others_are_not_counted_as_predicted() -> None:
    """A prediction that never comes true, beside a drafter whose guesses do."""
    driver = Driver(drafting=drafting_of("ngram"))
    driver.add(make_request("a", [1, 2, 3], 30, prediction=[41, 42, 43]), make_request("b", [1, 2, 4], 30))
    driver.run()
    outputs = {name: driver.outputs[name] for name in "ab"}
    assert driver.executor.num_accepted > 5
    assert not any(output.num_accepted_predictions for found in outputs.values() for output in found)
    assert not any(output.num_rejected_predictions for output in outputs["b"])
    assert sum(output.num_rejected_predictions for output in outputs["a"]) == 3


def test_method_none_speculates_never() -> None:
    assert isinstance(make_drafting(SpeculativeConfig(method="none"), StepTimes(), no_forced), NoDrafts)


def test_a_prediction_that_ends_the_output_is_accepted_up_to_there() -> None:
    request = make_request("a", [1, 2, 3], 5)
    outputs, *_ = generate_alone(make_request("a", [1, 2, 3], 40), MAX_LEN)
    stop = outputs[6]
    place = outputs.index(stop)
    params = SamplingParams(max_tokens=None, stop_token_ids=(stop,))
    drafting = drafting_of("prediction")
    driver = Driver(drafting=drafting)
    driver.add(make_request("a", request.token_ids, 40, params, prediction=outputs))
    driver.run()
    assert driver.ending("a") == (outputs[: place + 1], "stop", stop)
    accepted = sum(output.num_accepted_predictions for output in driver.outputs["a"])
    assert accepted <= place + 1
