"""CUDA graphs with a pool that runs the work anew, in Triton's interpreter: the same tokens as eager steps."""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.attention.base import WorkPlan
from quire.attention.registry import BACKENDS
from quire.attention.triton import DecodeKind, MixedKind, TritonAttention
from quire.engine.core import EngineCore
from quire.platform.cpu import CpuPlatform
from quire.runner.containment import MESSAGE
from quire.sched.draft_lengths import EveryDraft
from quire.sched.drafts import Drafts
from quire.types.masks import Masks
from quire.types.outputs import EngineOutput
from quire.types.sampling import SamplingParams
from quire.types.step import StepPlan, StepResult
from quire.types.structured import GrammarSource
from tests.e2e.broken import BAD_PROMPT, GOOD_PROMPT, assert_finite, make_broken
from tests.e2e.tiny import VOCAB, Driver, make_engine, make_model
from tests.e2e.tiny_grammar import VOCABULARY, regex, text_of
from tests.kernels.triton.paged import needs_triton
from tests.runner.engines import Rerun, Spy, capture_steps, spy_on

pytestmark = needs_triton
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}  # the interpreter runs each by itself


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model(tmp_path, "llama", num_hidden_layers=1, **HEADS)


def tokens_of(
    folder: Path, prompts: list[list[int]], params: SamplingParams = GREEDY, **settings: Any
) -> list[list[int]]:
    fixed = {"attention_backend": "triton", "max_num_seqs": 4, "max_model_len": 128, "kv_cache_memory": 1 << 20}
    core = make_engine(folder, **fixed, **settings)
    driver = Driver(core)
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt, params)
        if not settings:
            driver.step()
    answers = driver.finish()
    assert all(answer.error is None for answer in answers.values())
    return [answer.token_ids for answer in answers.values()]


WINDOWS = {"num_hidden_layers": 2, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize("kind", ["all", "windows"])
def test_same_tokens_as_eager_steps(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A prompt, another beside a decoding row, a prefix hit of few tokens, and pure decoding at the end.

    Layers may see all tokens, or some of them a window, which have block tables of their own.
    """
    if kind == "windows":
        folder = make_model(tmp_path / "windows", "gemma3_text", **HEADS, **WINDOWS)
    stem = [3 + 5 * index % 190 for index in range(20)]
    prompts = [stem, [7, 8, 9], [*stem[:16], 11, 12]]
    eager = tokens_of(folder, prompts)
    capture_steps(monkeypatch, mixed=(4, 24))
    assert tokens_of(folder, prompts) == eager
    assert Rerun.captured >= 3


@pytest.mark.parametrize("shared_from", [1, 99])
def test_full_prompt_steps(folder: Path, monkeypatch: pytest.MonkeyPatch, shared_from: int) -> None:
    """A step that is the first part of a long prompt, one of two prompts, and one of all kinds of rows.

    In its last layer wanted tokens are rows of one query each, whose keys may be shared among programs.
    """
    lengths = (20, 12, 14)
    prompts = [[3 + (7 * index + 11 * row) % 190 for index in range(count)] for row, count in enumerate(lengths)]
    limits = {"max_num_batched_tokens": 16, "long_prefill_token_threshold": 16}
    monkeypatch.setattr(CpuPlatform, "narrow_above", 4)
    eager = tokens_of(folder, prompts, SHORT, **limits)
    kinds: list[MixedKind] = []

    class Noted(TritonAttention):
        long_context = 18
        fused_queries, few_queries, min_shared_rows = 15, 2, shared_from
        multiprocessors = staticmethod(lambda: 1)

        def captures(self, work: WorkPlan, num_tokens: int) -> bool:
            taken = super().captures(work, num_tokens)
            if taken and num_tokens == 16:
                assert isinstance(work.kind, MixedKind)
                kinds.append(work.kind)
            return taken

    capture_steps(monkeypatch, mixed=(4,))
    monkeypatch.setattr(BACKENDS, "get", lambda name: Noted)
    assert tokens_of(folder, prompts, SHORT, **limits) == eager
    assert {bool(kind.whole) for kind in kinds} == {False, True}, "with and without a whole prompt"
    assert any(kind.singles and kind.tiles for kind in kinds), "prompts beside rows that decode"
    assert any(kind.long_context for kind in kinds), "programs that share the keys of a tile"


@pytest.mark.parametrize("alike", [False, True])
def test_draws_with_keys_shared_evenly_or_a_program_each(
    folder: Path, monkeypatch: pytest.MonkeyPatch, alike: bool
) -> None:
    prompts = [[3, 8, 13, 18, 23], [4, 9]]
    params = SamplingParams(temperature=0.9, top_k=9, top_p=0.8, min_p=0.01, max_tokens=3, ignore_eos=True, seed=2)
    eager = tokens_of(folder, prompts, params)
    capture_steps(monkeypatch, mixed=(4, 8))

    class Sharing(TritonAttention):
        min_shared_rows = 1

        def fills(self, programs: int) -> bool:
            return True

        def decode_kind(self, contexts: list[int] | None, num_rows: int) -> DecodeKind:
            return DecodeKind(alike)

    monkeypatch.setattr(BACKENDS, "get", lambda name: Sharing)
    assert tokens_of(folder, prompts, params) == eager
    assert Rerun.captured >= 2


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    params: SamplingParams
    grammar: GrammarSource | None = None


def ask(folder: Path, requests: list[Asked], **settings: Any) -> tuple[list[Any], EngineCore, Spy]:
    """What is answered when a request comes at each step, and which steps the first way ran."""
    fixed = {"attention_backend": "triton", "max_num_seqs": 4, "max_model_len": 64, "kv_cache_memory": 1 << 20}
    core = make_engine(folder, **{**fixed, **settings})
    core.constraints.set_vocabulary(VOCABULARY)
    spy = spy_on(core)
    driver = Driver(core)
    for index, request in enumerate(requests):
        fields = {} if request.grammar is None else {"grammar": request.grammar}
        driver.add(str(index), request.prompt, request.params, **fields)
        wait_for_grammars(core)
        driver.step()
    answers = driver.finish().values()
    assert all(answer.error is None for answer in answers)
    return [(answer.token_ids, answer.logprobs, answer.finish_reason) for answer in answers], core, spy


def masked_steps(spy: Spy) -> int:
    counted = Counter((shape.is_decode, shape.sampling.masked) for shape in spy.ran)
    return counted[True, True]


def wait_for_grammars(core: EngineCore) -> None:
    ready = threading.Event()
    core.parked.on_news = ready.set
    assert not core.parked or core.parked.has_news or ready.wait(30)


MASKED = [
    Asked([3, 8, 13], SamplingParams(temperature=0.0, max_tokens=3), regex("[a-c]{2,4}x")),
    Asked([4, 9], SamplingParams(temperature=1.2, top_k=20, seed=3, max_tokens=3, ignore_eos=True)),
    Asked([5, 6, 7], SamplingParams(temperature=1.5, top_p=0.9, seed=4, max_tokens=3), regex("[0-9]{3,9}")),
]


def test_masked_rows_beside_free_ones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eager, _, _ = ask(folder, MASKED)
    capture_steps(monkeypatch, mixed=(4, 8))
    captured, _, spy = ask(folder, MASKED, steps_in_flight=2)
    assert captured == eager
    assert masked_steps(spy) >= 2
    first, _, third = eager
    assert re.fullmatch("[a-c]{3}", text_of(first[0]))
    assert re.fullmatch("[0-9]{3}", text_of(third[0]))


@pytest.mark.nightly
def test_masked_rows_are_preempted_and_go_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are three blocks of 4 KiB and a null one, of which each request needs two in the end."""
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=20, ignore_eos=True)
    requests = [Asked([3 + row] * 12, params, regex("([a-f]|[0-9])*")) for row in range(2)]
    eager, _, _ = ask(folder, requests)
    capture_steps(monkeypatch)
    captured, core, spy = ask(folder, requests, kv_cache_memory=16 << 10, max_model_len=33)
    assert captured == eager
    assert core.scheduler.stats().num_preemptions > 0
    assert masked_steps(spy) > 10


def learns(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Times of steps as the scheduler learns them."""
    times: list[float] = []
    update = core.scheduler.update

    def spied(plan: StepPlan, result: StepResult, seconds: float) -> list[EngineOutput]:
        times.append(seconds)
        return update(plan, result, seconds)

    monkeypatch.setattr(core.scheduler, "update", spied)
    return times


def test_what_is_captured_ahead_is_not_captured_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Between two requests that get the same row: what prepares uses the same buffers."""
    expected = tokens_of(folder, [[7, 8, 9]])[0]
    capture_steps(monkeypatch, mixed=(32,))
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 64, "kv_cache_memory": 1 << 20}
    core = make_engine(folder, attention_backend="triton", **limits)
    driver = Driver(core)
    with caplog.at_level(logging.INFO, logger="quire"):
        learnt = learns(core, monkeypatch)
        driver.add("before", [7, 8, 9], GREEDY)
        driver.finish()
        assert learnt[:2] == [0.0, 0.0]  # the first prompt and the first decode step: captured before they ran
        assert min(learnt[2:]) > 0.0
    within = "captured a CUDA graph within a step"
    assert [within in record.getMessage() for record in caplog.records] == [True, True]
    caplog.clear()
    Rerun.captured, prepared = 0, 0
    while core.capture_next():
        prepared += 1
    # Decode steps of 2 rows; sampling for 1 row at a temperature and both kinds for 2; five more kinds of prompts.
    assert prepared == Rerun.captured == 1 + 3 + 5
    with caplog.at_level(logging.INFO, logger="quire"):
        driver.add("after", [7, 8, 9], GREEDY)
        answers = driver.finish()
    assert answers["before"].token_ids == answers["after"].token_ids == expected
    assert Rerun.captured == prepared
    assert within not in caplog.text


def test_sampling_with_drafts_is_captured_ahead_after_the_first_prediction(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step with drafts has another number of samples: captured one by one, each would delay a step."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    expected = tokens_of(folder, [[7, 8, 9]], params)[0]
    capture_steps(monkeypatch, mixed=(32,))
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 64, "kv_cache_memory": 1 << 20}
    core = make_engine(folder, attention_backend="triton", **limits)
    drafting = core.scheduler.state.drafting
    assert isinstance(drafting, Drafts)
    drafting._lengths = EveryDraft()

    def captured_ahead() -> int:
        before = Rerun.captured
        while core.capture_next():
            pass
        return Rerun.captured - before

    assert captured_ahead() > 0
    driver = Driver(core)
    for name in ("first", "second"):
        driver.add(name, [7, 8, 9], params, prediction=expected)
        answers = driver.finish()
        assert answers[name].token_ids == expected
        if name == "first":
            assert core.stats().num_draft_tokens > 0
            assert captured_ahead() > 0
            known = Rerun.captured
    assert Rerun.captured == known


SHAPED = [
    Asked([4] * 40, SamplingParams(temperature=0.9, seed=3, max_tokens=2, ignore_eos=True, repetition_penalty=1.4)),
    Asked([3, 8, 13], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=3)),
    Asked([5, 6], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logit_bias={11: 90.0})),
]


def test_first_tokens_are_sampled_by_captured_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what rows ask for, beside rows that decode, and after a step in which nobody samples."""
    eager, _, _ = ask(folder, SHAPED, max_num_batched_tokens=32)
    capture_steps(monkeypatch)
    captured, _, spy = ask(folder, SHAPED, max_num_batched_tokens=32)
    assert [tokens for tokens, _, _ in captured] == [tokens for tokens, _, _ in eager]
    for (_, mine, _), (_, theirs, _) in zip(captured, eager, strict=True):
        assert [entry.token_ids for entry in mine] == [entry.token_ids for entry in theirs]
        for one, other in zip(mine, theirs, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert captured[2][0][0] == 11
    assert not spy.refused, "all steps with prompts are captured"
    assert {0, 2} <= {shape.num_samples for shape in spy.ran if not shape.is_decode}


def test_a_prompt_that_breaks_fails_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token 0, which is also what captured steps are padded with, is broken too: nothing of it stays."""
    limits = {"attention_backend": "triton", "max_num_seqs": 4, "max_model_len": 64, "kv_cache_memory": 1 << 20}
    (expected,) = tokens_of(folder, [GOOD_PROMPT], SHORT)
    capture_steps(monkeypatch, mixed=(32, 128))
    core = make_broken(folder, **limits)
    spy = spy_on(core)
    driver = Driver(core)
    driver.add("bad", BAD_PROMPT, SHORT)
    driver.add("good", GOOD_PROMPT, SHORT)
    answers = driver.finish()
    assert any(not shape.is_decode for shape in spy.ran), "the prompts were computed by a captured step"
    assert answers["bad"].error == MESSAGE
    assert (answers["good"].error, answers["good"].token_ids) == (None, expected)
    assert_finite(core)


def test_a_row_whose_grammar_leaves_no_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails alone, and the message is that of an eager step."""
    capture_steps(monkeypatch)
    core = make_engine(folder, attention_backend="triton", max_num_seqs=4, max_model_len=64, kv_cache_memory=1 << 20)
    core.constraints.set_vocabulary(VOCABULARY)
    nothing = np.zeros((1, -(-VOCAB // 32)), dtype=np.int32)
    driver = Driver(core)
    driver.add("masked", [3, 4], SamplingParams(temperature=0.0, max_tokens=5), grammar=regex("a{6}"))
    driver.add("free", [5, 6], GREEDY)
    wait_for_grammars(core)
    driver.step()
    made: Future[Masks] = Future()
    made.set_result(nothing)
    monkeypatch.setattr(core.constraints, "start_masks", lambda requests: made)
    answers = driver.finish()
    assert answers["masked"].error is not None
    assert "no token may be chosen" in answers["masked"].error
    assert answers["free"].error is None
    assert len(answers["free"].token_ids) == 3
