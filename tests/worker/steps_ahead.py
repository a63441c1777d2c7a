"""Several steps of one request in flight through stages: with rows that end, and steps that fail, among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from msgspec.structs import replace

from quire.engine.core import EngineCore
from quire.types.sampling import SamplingParams
from tests.e2e.tiny import Answer, Driver, run_alone

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=1.0, seed=7, logprobs=2)
PROMPT = [5, 6, 7]


def check_steps_ahead(core: EngineCore, one: EngineCore, fail: Callable[[int], None], num_stages: int) -> None:
    """The bits of `one`; `fail` makes a rank raise before its next step."""
    alone = run_alone(one, PROMPT, DRAWN)
    greedy, drawn = run_alone(one, PROMPT, GREEDY).content(), alone.content()
    assert _run_one(core, GREEDY, num_stages).content() == greedy
    assert _run_one(core, DRAWN, num_stages).content() == drawn
    _check_ends(core, one, alone.token_ids)
    for rank in range(num_stages):
        for after in (1, 5):
            assert _run_one(core, DRAWN, num_stages, after, partial(fail, rank)).content() == drawn, (rank, after)
    assert _run_one(core, GREEDY, num_stages).content() == greedy


def _run_one(
    core: EngineCore, params: SamplingParams, num_stages: int, fail_after: int = -1, fail: Callable[[], None] = print
) -> Answer:
    """Beside a request that ends early, when steps fail: it must not, because of the other."""
    driver, count, most, begin = Driver(core), 0, 0, core.stats().num_preemptions
    driver.add("a", PROMPT, params)
    if fail_after >= 0:
        driver.add("short", [9, 10], replace(params, max_tokens=3))
    while core.has_unfinished():
        driver.step()
        count += 1
        if count == fail_after:
            fail()
        steps = core.scheduler.state.in_flight
        assert all(len(step.requests) == 1 for step in steps) or fail_after >= 0
        most = max(most, len(steps))
    assert (core.stats().num_preemptions > begin) == (fail_after >= 0), "requests of failed steps start over"
    assert most == num_stages, "as many as there are stages stay in flight when one of them is done"
    return driver.answers["a"]


def _check_ends(core: EngineCore, one: EngineCore, tokens: Iterable[int]) -> None:
    """More requests than rows, most of which end with a token that nobody knew when the next steps were planned."""
    stops = [*dict.fromkeys(tokens)]
    found = []
    for engine in (one, core):
        driver = Driver(engine)
        for index in range(12):
            stop = (stops[1 + index % 7],) if index % 4 else ()
            prompt = PROMPT if index % 3 else [*PROMPT, index]
            driver.add(str(index), prompt, replace(DRAWN, stop_token_ids=stop, max_tokens=20 + index))
        found.append(driver.finish())
    contents = [{name: answer.content() for name, answer in answers.items()} for answers in found]
    assert contents[0] == contents[1]
    assert any(answer.finish_reason == "stop" for answer in found[0].values())
