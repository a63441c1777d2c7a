"""For tests of speculation: requests of every kind, and drafters that know what each will say."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.engine.core import EngineCore
from quire.sched.drafts import Drafter, Drafts
from quire.sched.request import Request
from quire.types.sampling import SamplingParams, ThinkingMarks
from quire.types.step import StepPlan, StepResult
from tests.e2e.tiny import VOCAB, Answer, Driver, make_engine
from tests.e2e.tiny_grammar import VOCABULARY, regex
from tests.runner.engines import runner_of

# What requests ask for; each is greedy once and sampled once.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": 3},
    "wide logprobs": {"logprobs": 30},
    "asked logprobs": {"logprobs": 0, "logprob_token_ids": (5, 17)},
    "penalties": {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.2, "logprobs": 1},
    "min tokens": {"min_tokens": 12, "stop_token_ids": tuple(range(20, 60)), "ignore_eos": False},
    "stop": {"stop_token_ids": tuple(range(30, 34)), "ignore_eos": False},
    "bad words": {"bad_words_token_ids": tuple((token, other) for token in range(9, 70) for other in (7, 8, 9))},
    "bias": {"logit_bias": {7: 2.0, 9: 3.0, 11: -100.0}},
    "allowed": {"allowed_token_ids": tuple(range(40, 90)), "repetition_penalty": 1.4},
    "limits": {"top_k": 12, "top_p": 0.9, "min_p": 0.02},
    "thinking": {"thinking_token_budget": 6, "thinking_marks": ThinkingMarks((40,), (41, 42), True)},
}
EAGER = ("wide logprobs", "asked logprobs", "thinking")  # which no captured step has
GRAMMAR = r"([a-f]{1,3}[0-9]){2,12}"


class Oracle(Drafter):
    """Proposes `longest` tokens of the outputs that it knows, each wrong with some probability."""

    name = "oracle"
    default_tokens = 64

    def __init__(
        self,
        outputs: Mapping[str, Sequence[int]],
        vocab_size: int,
        longest: int = 4,
        wrong: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._longest, self._wrong = longest, wrong
        self._outputs, self._vocab_size = outputs, vocab_size
        self._draw = random.Random(seed)

    def propose(self, request: Request, num_in_flight: int, limit: int) -> list[int]:
        known = self._outputs[request.request_id]
        first = len(request.token_ids) - request.num_prompt_tokens + num_in_flight
        count = min(limit, self._longest)
        if 0.0 < self._wrong < 1.0:
            count = self._draw.randint(0, count)
        return [
            (token + self._draw.randrange(1, self._vocab_size)) % self._vocab_size
            if self._draw.random() < self._wrong
            else token
            for token in known[first : first + count]
        ]


def draft_with(core: EngineCore, drafter: Oracle) -> None:
    core.scheduler._state.drafting = Drafts(drafter)


def draft_always(core: EngineCore) -> None:
    """Let an engine's own drafters draft whatever it costs."""
    drafting = core.scheduler._state.drafting
    assert isinstance(drafting, Drafts)
    core.scheduler._state.drafting = Drafts(*drafting._drafters, most=4)


def engine(model: Path, **settings: Any) -> EngineCore:
    core = make_engine(model, num_threads=2, **settings)
    core.constraints.set_vocabulary(VOCABULARY)
    return core


def requests(
    seed: int = 0, outputs: int = 30, left_out: Sequence[str] = ()
) -> dict[str, tuple[list[int], SamplingParams, dict[str, Any]]]:
    """One of each kind of request; many share a prefix, and two share all of their prompt."""
    rng = random.Random(seed)
    stem = [rng.randrange(3, VOCAB) for _ in range(40)]
    found: dict[str, tuple[list[int], SamplingParams, dict[str, Any]]] = {}
    for sampled in (False, True):
        for name, fields in FEATURES.items():
            params = {
                "temperature": 0.9 if sampled else 0.0,
                "seed": rng.getrandbits(40),
                "ignore_eos": True,
                **fields,
            }
            prompt = stem[: rng.choice([0, 20, 40])] + [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 9))]
            length = rng.randint(8, outputs)
            if name not in left_out:
                found[f"{name}, {sampled}"] = prompt, SamplingParams(max_tokens=length, **params), {}
    prompt, params, _ = found["plain, True"]
    found["n > 1"] = prompt, SamplingParams(temperature=0.9, seed=1, max_tokens=20, ignore_eos=True), {}
    for seed_of, temperature in ((3, 0.0), (4, 1.0)):
        constrained = SamplingParams(temperature=temperature, seed=seed_of, max_tokens=24, logprobs=2)
        found[f"grammar, {temperature}"] = stem[:11], constrained, {"grammar": regex(GRAMMAR)}
    return found


def run(core: EngineCore, seed: int = 0, **kinds: Any) -> dict[str, Answer]:
    """All requests, at random steps."""
    rng, driver = random.Random(seed), Driver(core)
    for name, (prompt, params, fields) in requests(**kinds).items():
        driver.add(name, prompt, params, **fields)
        for _ in range(rng.choice([0, 0, 0, 1, 3])):
            driver.step()
    answers = driver.finish()
    core.scheduler.check_integrity()
    stats = core.scheduler.stats()
    assert stats.num_free_blocks == stats.num_blocks, "blocks of drafts are given back"
    return answers


def assert_same(found: dict[str, Answer], expected: dict[str, Answer]) -> None:
    assert {name: answer.error for name, answer in found.items() if answer.error} == {}
    for name, answer in expected.items():
        assert found[name].content() == answer.content(), name


class Counting:
    """Counts drafts, and those that held, of the steps of an engine."""

    def __init__(self, core: EngineCore) -> None:
        self.num_drafts = self.num_accepted = self.num_steps = 0
        self.num_pooled_beside = 0  # rows that pooled in a step with drafts
        self.rejected: set[str | None] = set()  # requests that a draft did not hold of
        self._request_ids = runner_of(core).rows.request_ids
        self._finish = runner_of(core).finish
        runner_of(core).finish = self._count

    def _count(self, step: Any) -> StepResult:
        result, plan = self._finish(step), step.plan
        assert isinstance(plan, StepPlan)
        self.num_steps += 1
        self.num_pooled_beside += len(result.pooled) if plan.draft_token_ids else 0
        for row, tokens in zip(plan.rows, result.token_ids, strict=True):
            if drafts := plan.draft_token_ids.get(row):
                self.num_drafts += len(drafts)
                self.num_accepted += len(tokens) - 1
                self.rejected |= {self._request_ids[row]} if len(tokens) <= len(drafts) else set()
        return result
