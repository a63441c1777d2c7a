"""Conversations with hybrid models: nearly all that an earlier turn held comes from the cache, with the same bits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from quire.types.sampling import SamplingParams
from tests.e2e.test_equality import MODELS
from tests.e2e.tiny import VOCAB, make_engine, make_model, run_alone

TOKENS = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("turns"), **MODELS["recurrent"] | {"max_position_embeddings": 4096})


@pytest.mark.parametrize("turns", [3, pytest.param(8, marks=pytest.mark.nightly)])
def test_turns_go_on_from_what_earlier_ones_computed(model: Path, turns: int) -> None:
    core = make_engine(model, num_threads=2, max_num_batched_tokens=512)
    draw, history, held = random.Random(0), [], 0
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS // 2, ignore_eos=True)
    for turn in range(turns):
        history = history + [draw.randrange(3, VOCAB) for _ in range(TOKENS // 2)]
        answer = run_alone(core, history, params)
        assert answer.num_cached_tokens >= 0.95 * held if turn else answer.num_cached_tokens == 0
        history, held = history + answer.token_ids, len(history) + len(answer.token_ids) - 1
    cold = make_engine(model, num_threads=2, enable_prefix_caching=False, max_num_batched_tokens=512)
    assert run_alone(cold, history[: -TOKENS // 2], params).token_ids == history[-TOKENS // 2 :]
    assert core.scheduler.stats().prefix_without_state == 0


def test_turns_whose_thinking_is_dropped_go_on_behind_the_last_question(model: Path) -> None:
    """As templates of thinking models render it: the prompt begins the thinking, and the next turn tells the answer
    alone, so that the two part where the answer begins."""
    core, cold = make_engine(model, num_threads=2), make_engine(model, num_threads=2, enable_prefix_caching=False)
    draw, end = random.Random(3), 2
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    thinks = [draw.randrange(3, VOCAB) for _ in range(20)]
    history, found = [draw.randrange(3, VOCAB) for _ in range(30)] + [end], []
    for _ in range(4):
        history += [*(draw.randrange(3, VOCAB) for _ in range(50)), end]
        answer = run_alone(core, history + thinks, params)
        assert answer.token_ids == run_alone(cold, history + thinks, params).token_ids
        found.append((answer.num_cached_tokens, len(history) // 16 * 16))
        history += [*answer.token_ids[20:], end]
    assert [cached for cached, _ in found[1:]] == [asked for _, asked in found[:-1]]
    assert core.scheduler.stats().prefix_without_state == 0


def test_misses_for_want_of_a_state_are_counted(model: Path) -> None:
    core = make_engine(model, num_threads=2)
    draw, params = random.Random(1), SamplingParams(max_tokens=1)
    shared = [draw.randrange(3, VOCAB) for _ in range(64)]
    found = []
    for _ in range(3):
        tail = [draw.randrange(3, VOCAB) for _ in range(40)]
        answer = run_alone(core, shared + tail, params)
        found.append((answer.num_cached_tokens, answer.num_without_state))
    assert found == [(0, 0), (0, 64), (64, 0)], "the second one leaves a checkpoint where attention had hit"
    assert core.scheduler.stats().prefix_without_state == 64


def test_a_small_state_cache_gives_no_wrong_state(model: Path) -> None:
    core = make_engine(model, num_threads=2, state_cache_size=0, kv_cache_memory=3 << 20, max_num_seqs=2)
    plain = make_engine(model, num_threads=2, enable_prefix_caching=False)
    draw = random.Random(2)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompts = [[draw.randrange(3, VOCAB) for _ in range(draw.randrange(20, 90))] for _ in range(4)]
    for _ in range(10):
        prompt = [*draw.choice(prompts)[: draw.randrange(18, 90)], draw.randrange(3, VOCAB)]
        assert run_alone(core, prompt, params).token_ids == run_alone(plain, prompt, params).token_ids
