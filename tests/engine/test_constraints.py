"""Constraints and the core: a request waits for its grammar and nobody else does; ends and errors are its own."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import msgspec
import numpy as np
import pytest

from quire.engine.client import InProcClient
from quire.engine.constraints import Constraints
from quire.engine.core import EngineCore
from quire.engine.loop import EngineLoop
from quire.sched.drafts import Drafter
from quire.sched.request import Request
from quire.structured.manager import GrammarManager
from quire.structured.sources import make_source
from quire.types.masks import Masks
from quire.types.messages import EngineInfo
from quire.types.outputs import EngineOutput
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from quire.types.step import StepPlan, StepResult
from quire.types.structured import GrammarLimits, GrammarSource, StructuredOutputsParams, Vocabulary
from quire.worker.executor import Executor
from tests.engine.test_core import make_core
from tests.fakes import ScriptedDrafter

LETTERS = [bytes([97 + index]) for index in range(26)]
EOS = 30
VOCABULARY = Vocabulary([*LETTERS, *[b""] * 4, b"</s>", *[b""] * 19], [EOS], [EOS])
INFO = EngineInfo(50, 64, 4, 65, 8)


class MaskedStep(Future[StepResult]):
    def __init__(self, executor: LowestAllowed, plan: StepPlan) -> None:
        super().__init__()
        self._executor, self._plan = executor, plan

    def sample(self, masks: Future[Masks]) -> None:
        assert self._executor.waiting is self
        self._executor.waiting = None
        lines, drafts = masks.result(30), self._plan.draft_token_ids
        assert len(lines) == sum(1 + len(drafts.get(row, ())) for row in self._plan.mask_slots)
        tokens = [int(np.flatnonzero(np.unpackbits(line.view(np.uint8), bitorder="little"))[0]) for line in lines]
        self.set_result(result_of(self._plan, {row: tokens[line:] for row, line in self._plan.mask_slots.items()}))


def result_of(plan: StepPlan, tokens: dict[int, list[int]]) -> StepResult:
    """`tokens`: what is sampled at the positions of rows with a mask. Counts drafts that hold."""
    result = StepResult(plan.step_id, [])
    for row in plan.rows:
        drafts = plan.draft_token_ids.get(row, [])
        sampled = tokens.get(row, [4] * (1 + len(drafts)))
        held = next((place for place, draft in enumerate(drafts) if draft != sampled[place]), len(drafts))
        result.token_ids.append(sampled[: 1 + held])
    return result


class LowestAllowed(Executor):
    """Says the lowest token that is allowed; without a mask the letter e."""

    def __init__(self) -> None:
        self.waiting: MaskedStep | None = None

    def execute(self, plan: StepPlan) -> MaskedStep:
        assert self.waiting is None, "the step before has not sampled yet"
        step = MaskedStep(self, plan)
        if plan.mask_slots:
            assert set(plan.mask_slots) <= set(plan.rows)
            self.waiting = step
        else:
            step.set_result(result_of(plan, {}))
        return step

    def is_sticky(self, error: Exception) -> bool:
        return False

    def shutdown(self) -> None:
        self.waiting = None


class RandomLetters(Drafter):
    """Drafts of letters; what is sampled is one of the first few, so that some hold."""

    name = "random"
    default_tokens = 8

    def __init__(self) -> None:
        self._draw = random.Random(0)

    def propose(self, request: Request, num_in_flight: int, limit: int) -> list[int]:
        letters = [0, 0, 1, 3, 4, 4, 16, 23, 24, 25, EOS]
        return self._draw.choices(letters, k=self._draw.randint(0, min(limit, 4)))


@pytest.fixture(params=[(1, None), (2, None), (3, None), (1, RandomLetters()), (3, RandomLetters())])
def core(request: pytest.FixtureRequest) -> Iterator[EngineCore]:
    depth, drafter = request.param
    scheduler = make_core(drafter=drafter)[0].scheduler
    constraints = Constraints(GrammarManager(GrammarLimits(compile_timeout=20.0)))
    core = EngineCore(scheduler, LowestAllowed(), depth, constraints)
    core.constraints.set_vocabulary(VOCABULARY)
    yield core
    core.shutdown()


def ask(name: str, pattern: str | None, max_tokens: int = 8, **fields: object) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        token_ids=[1, 2, 3],
        params=SamplingParams(**fields),  # type: ignore[arg-type]  # any field
        eos_token_ids=(EOS,),
        max_tokens=max_tokens,
        grammar=None if pattern is None else GrammarSource("regex", pattern),
    )


def run(core: EngineCore) -> dict[str, EngineOutput]:
    """Each request's tokens and last output."""
    client = InProcClient(core, EngineLoop(core, debug_checks=True), INFO)
    said: dict[str, EngineOutput] = {}
    while client.has_unfinished():
        for output in client.get_outputs().outputs:
            before = said.get(output.request_id)
            if before is not None:
                output = msgspec.structs.replace(output, token_ids=before.token_ids + output.token_ids)
            said[output.request_id] = output
    return said


def text(output: EngineOutput) -> str:
    return b"".join(VOCABULARY.pieces[token] for token in output.token_ids).decode()


def test_each_request_follows_its_own_grammar(core: EngineCore) -> None:
    for name, pattern in {"x": "xyz", "free": None, "z": "[q-t]{3}", "open": "b+"}.items():
        assert core.add_request(ask(name, pattern)) == []
    said = run(core)
    assert {name: text(output) for name, output in said.items()} == {
        "x": "xyz",
        "free": "e" * 8,
        "z": "qqq",
        "open": "b" * 8,
    }
    assert {name: (output.finish_reason, output.is_complete) for name, output in said.items()} == {
        "x": ("stop", True),
        "free": ("length", False),
        "z": ("stop", True),
        "open": ("length", False),
    }
    assert not core.constraints.in_use
    core.scheduler.check_integrity()


@pytest.mark.parametrize("eos", [False, True])
def test_what_is_sampled_behind_the_end_of_a_grammar_is_cut_off(eos: bool) -> None:
    """Drafts go on behind it, and hold: there is no mask there. Also when the last of them ends the request."""
    behind = [EOS if eos else 0, 0]
    scheduler = make_core(drafter=ScriptedDrafter(23, 24, *behind))[0].scheduler
    core = EngineCore(scheduler, LowestAllowed(), 1, Constraints(GrammarManager(GrammarLimits(compile_timeout=20.0))))
    core.constraints.set_vocabulary(VOCABULARY)
    core.add_request(ask("x", "xy", logprobs=0))
    said = run(core)["x"]
    assert (said.token_ids, said.finish_reason, said.is_complete) == ([23, 24], "stop", True)
    core.scheduler.check_integrity()
    core.shutdown()


def test_a_grammar_that_does_not_compile_is_the_callers_mistake(core: EngineCore) -> None:
    core.add_request(ask("bad", "("))
    core.add_request(ask("good", "ab"))
    said = run(core)
    assert (said["bad"].finish_reason, said["bad"].error_field) == ("error", "structured_outputs.regex")
    assert "cannot be compiled" in (said["bad"].error or "")
    assert text(said["good"]) == "ab"


def test_a_grammar_that_turns_out_to_be_too_complex_is_the_callers_mistake(core: EngineCore) -> None:
    """It compiles, but after a token there are more ways to go on than the library will follow."""
    count = 900
    starts = " | ".join(f"x{index}" for index in range(count))
    ways = "".join(f'x{index}: "a" x{(index + 1) % count} | "ab" x{(index + 7) % count}\n' for index in range(count))
    source = make_source(StructuredOutputsParams(grammar=f"start: {starts}\n{ways}"))
    core.add_request(EngineRequest(**{**_fields(ask("complex", "a")), "grammar": source}))
    core.add_request(ask("good", "ab"))
    said = run(core)
    assert (said["complex"].finish_reason, said["complex"].error_field) == ("error", "structured_outputs.grammar")
    assert re.fullmatch(
        r"structured_outputs\.grammar is too complex: .*max is 2000.*; make it simpler", str(said["complex"].error)
    )
    assert text(said["good"]) == "ab"


def test_a_request_that_could_never_run_is_refused_before_it_is_compiled(core: EngineCore) -> None:
    too_long = ask("long", "a", max_tokens=8)
    (refusal,) = core.add_request(EngineRequest(**{**_fields(too_long), "token_ids": [1] * 64}))
    assert (refusal.finish_reason, refusal.error_field) == ("error", "token_ids")
    core.add_request(ask("twice", "ab"))
    (refusal,) = core.add_request(ask("twice", "ab"))
    assert "already being served" in (refusal.error or "")
    assert text(run(core)["twice"]) == "ab"


def test_others_pass_a_request_whose_grammar_is_compiling() -> None:
    manager = GrammarManager()
    pending: list[Future[object]] = []

    def compile_later(source: GrammarSource) -> Future[object]:
        pending.append(Future())
        return pending[-1]

    manager._compiler.compile = compile_later  # type: ignore[assignment]  # the moment is the test's to choose
    core = EngineCore(make_core()[0].scheduler, LowestAllowed(), 1, Constraints(manager))
    core.add_request(ask("held", "ab"))
    core.add_request(ask("free", None))
    outputs = [output for _ in range(8) for output in core.step().outputs]
    assert {output.request_id for output in outputs} == {"free"}
    assert not core.has_work()
    assert core.has_unfinished()
    woken = threading.Event()
    core.parked.on_news = woken.set
    (aborted,) = core.abort(["held"])
    assert (aborted.request_id, aborted.finish_reason) == ("held", "abort")
    pending[0].set_result(object())
    assert woken.wait(30)
    assert core.step().outputs == []
    assert not core.has_unfinished()


def test_an_abort_in_the_middle_leaves_the_others_right(core: EngineCore) -> None:
    for name in ("a", "b", "c"):
        core.add_request(ask(name, "[a-c]{6}d"))
    said: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    aborted = False
    client = InProcClient(core, EngineLoop(core, debug_checks=True), INFO)
    while client.has_unfinished():
        for output in client.get_outputs().outputs:
            said[output.request_id] += output.token_ids
        if not aborted and len(said["b"]) >= 2:
            client.abort(["b"])
            aborted = True
    assert said["a"] == said["c"] == [0] * 6 + [3]
    assert len(said["b"]) < 7


def _fields(request: EngineRequest) -> dict[str, object]:
    return {name: getattr(request, name) for name in request.__struct_fields__}
