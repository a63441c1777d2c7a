from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quire.runner.sampling.sampler import Sampler
from quire.types.sampling import PoolingParams
from quire.types.step import RowStart, TokenLogprobs
from tests.runner.sampling import reference
from tests.runner.sampling.helpers import (
    CPU,
    MAX_ROWS,
    Outcome,
    Rows,
    bind_references,
    make_logits,
    make_row,
    rows_of,
    run,
    sample,
    start_of,
)
from tests.runner.sampling.reference import Row

VOCAB_SIZES = [5, 37, 50, 130, 259]


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, list[Row], list[int]]:
    vocab_size = draw(st.sampled_from(VOCAB_SIZES))
    rows = draw(st.lists(rows_of(vocab_size), min_size=1, max_size=6))
    order = draw(st.permutations(range(MAX_ROWS)))[: len(rows)]
    return make_logits(draw(st.integers(0, 2**31)), len(rows), vocab_size), rows, list(order)


def check_logprobs(found: TokenLogprobs, logits: np.ndarray, token: int, count: int) -> None:
    exact = reference.logprobs(logits)
    count = len(exact) if count < 0 else min(count, len(exact))
    assert found.token_ids == [token, *reference.in_order(logits)[:count]]
    np.testing.assert_allclose(found.logprobs, exact[found.token_ids], atol=3e-6)
    assert found.rank == 1 + int((logits > logits[token]).sum())


@settings(max_examples=25, deadline=None)
@given(batches())
def test_torch_references_agree_with_the_plain_one(batch: tuple[np.ndarray, list[Row], list[int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        bind_references(patch)
        check_against_the_plain_reference(*batch)


@settings(max_examples=200, deadline=None)
@given(batches())
def test_agrees_with_the_plain_reference(batch: tuple[np.ndarray, list[Row], list[int]]) -> None:
    check_against_the_plain_reference(*batch)


def check_against_the_plain_reference(logits: np.ndarray, rows: list[Row], order: list[int]) -> None:
    for line, row in zip(logits, rows, strict=True):
        shaped = reference.shape(line, row)
        assume(shaped.max() == -np.inf or reference.nucleus_margin(shaped, row.params) > 1e-6)
    output = run(logits, rows, order)
    tokens, errors, logprobs = output.tokens(), output.errors(), output.logprobs()
    for place, row in enumerate(rows):
        expected = reference.sample(logits[place], row)
        if expected is None:
            assert "no token may be chosen" in errors[place]
            continue
        assert place not in errors
        assert tokens[place] == expected
        assert (place in logprobs) == (row.params.logprobs is not None)
        if row.params.logprobs is not None:
            check_logprobs(logprobs[place], logits[place], expected, row.params.logprobs)


def answers(output: Outcome) -> list[tuple[int, str | None, TokenLogprobs | None]]:
    errors, logprobs = output.errors(), output.logprobs()
    return [(token, errors.get(place), logprobs.get(place)) for place, token in enumerate(output.tokens())]


@settings(max_examples=60, deadline=None)
@given(batches(), st.data())
def test_a_row_does_not_depend_on_its_batch(
    batch: tuple[np.ndarray, list[Row], list[int]], data: st.DataObject
) -> None:
    logits, rows, order = batch
    together = answers(run(logits, rows, order))
    for place, row in enumerate(rows):
        assert answers(run(logits[place : place + 1], [row])) == together[place : place + 1]
    shuffled = data.draw(st.permutations(range(len(rows))))
    again = answers(run(logits[shuffled], [rows[place] for place in shuffled]))
    assert again == [together[place] for place in shuffled]


def test_a_row_does_not_depend_on_its_batch_at_a_real_vocabulary() -> None:
    vocab_size = 49_155
    generator = np.random.default_rng(0)
    logits = (generator.normal(size=(9, vocab_size)) * 3).astype(np.float32)
    kinds = [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.8, "logprobs": 0},
        {"top_p": 0.9},
        {"top_k": 40, "top_p": 0.95, "logprobs": 20},
        {"top_k": 3000, "top_p": 0.5},
        {"min_p": 0.05, "repetition_penalty": 1.2},
        {"frequency_penalty": 0.5, "temperature": 1.3},
        {"logit_bias": {17: 4.0, 49_154: 9.0}, "top_k": 1024},
        {"allowed_token_ids": [5, 77, 49_154], "logprobs": 1},
    ]
    rows = [make_row(outputs=[7, 7, 9], seed=seed, **kind) for seed, kind in enumerate(kinds)]
    together = answers(run(logits, rows))
    for place, row in enumerate(rows):
        assert answers(run(logits[place : place + 1], [row])) == together[place : place + 1]
        assert reference.sample(logits[place], row) == together[place][0]


@pytest.mark.parametrize("vocab_size", [5, 127, 128, 129, 640, 1000])
def test_greedy_ties_go_to_the_lowest_id(vocab_size: int) -> None:
    logits = np.zeros((3, vocab_size), dtype=np.float32)
    logits[1, vocab_size // 2 :] = 1.0
    logits[2, -1] = 1.0
    rows = [make_row(temperature=0.0)] * 3
    assert run(logits, rows).tokens() == [0, vocab_size // 2, vocab_size - 1]


@pytest.mark.parametrize("params", [{}, {"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0}])
@pytest.mark.parametrize("poison", [np.nan, -np.nan, np.inf])
def test_a_row_with_bad_logits_fails_alone(params: dict[str, float], poison: float) -> None:
    logits = make_logits(1, 3, 50)
    rows = [make_row(**{"temperature": 0.9, **params}) for _ in range(3)]
    expected = answers(run(logits, rows))
    logits[1, 20] = poison
    output = run(logits, rows)
    assert list(output.errors()) == [1]
    assert "the model produced NaN" in output.errors()[1]
    assert 0 <= output.tokens()[1] < 50
    assert [answers(output)[place] for place in (0, 2)] == [expected[0], expected[2]]


def test_a_bad_logit_is_noticed_even_where_it_is_masked() -> None:
    logits = make_logits(1, 1, 50)
    logits[0, 20] = np.nan
    assert list(run(logits, [make_row(allowed_token_ids=[3])]).errors()) == [0]


def test_minus_infinity_is_a_legal_logit() -> None:
    logits = make_logits(1, 2, 50)
    logits[:, 10:] = -np.inf
    for params in ({"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 30, "top_p": 0.9}, {"min_p": 0.001}):
        output = run(logits, [make_row(**params, seed=seed) for seed in (1, 2)])
        assert output.errors() == {}
        assert max(output.tokens()) < 10


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {}, {"top_k": 4, "top_p": 0.5}, {"top_p": 0.5, "min_p": 0.2}]
)
def test_contradictory_masks_are_an_error_of_that_row(params: dict[str, float]) -> None:
    rows = [make_row(**params), make_row(allowed_token_ids=[4], min_tokens=3, stop_token_ids=[4], **params)]
    output = run(make_logits(2, 2, 50), rows)
    assert list(output.errors()) == [1]
    assert "no token may be chosen" in output.errors()[1]


def test_overflow_by_parameters_is_an_error_of_that_row() -> None:
    rows = [make_row(), make_row(repetition_penalty=1e-6, outputs=[4, 5])]
    logits = make_logits(2, 2, 50)
    logits[1, 4] = 3e38
    output = run(logits, rows)
    assert list(output.errors()) == [1]
    assert "overflow" in output.errors()[1]


def test_a_row_that_is_reused_forgets_its_last_request() -> None:
    logits = make_logits(3, 1, 50)
    sampler = Sampler(50, MAX_ROWS, CPU)
    everything = make_row(
        temperature=2.0,
        top_k=3,
        top_p=0.5,
        min_p=0.3,
        presence_penalty=2.0,
        repetition_penalty=3.0,
        logit_bias={1: 50.0},
        allowed_token_ids=[1, 2, 3],
        bad_words_token_ids=((2,),),
        min_tokens=5,
        stop_token_ids=[3],
        logprobs=3,
    )
    run(logits, [everything], sampler=sampler)
    sampler.remove_request(0)
    plain = make_row(temperature=0.0)
    output = run(logits, [plain], sampler=sampler)
    assert output.tokens() == [int(logits[0].argmax())]
    assert output.logprobs() == {}


def test_rows_that_do_not_sample_now_are_left_out() -> None:
    logits = make_logits(4, 6, 50)
    rows = [
        make_row(
            seed=seed,
            logit_bias={seed: 5.0},
            bad_words_token_ids=((seed + 1,),),
            allowed_token_ids=list(range(seed, 40)),
            min_tokens=2,
            eos=(seed + 2,),
        )
        for seed in range(6)
    ]
    sampler = Sampler(50, MAX_ROWS, CPU)
    everyone = run(logits, rows, sampler=sampler).tokens()
    state = Rows.empty()
    for index, row in enumerate(rows):
        state.place(index, row)
    for some in ([4], [2, 0], [5, 1, 3]):
        found = sample(sampler, torch.tensor(logits[some]), some, state)
        assert found.tokens() == [everyone[index] for index in some]


def test_resuming_after_preemption_draws_the_same() -> None:
    row = make_row(outputs=[4, 9, 9], frequency_penalty=0.4, top_p=0.8)
    logits = make_logits(5, 1, 50)
    sampler = Sampler(50, MAX_ROWS, CPU)
    first = run(logits, [row], sampler=sampler).tokens()
    sampler.remove_request(0)
    assert run(logits, [row], order=[7], sampler=sampler).tokens() == first


def test_the_position_changes_the_draw() -> None:
    logits = np.zeros((12, 50), dtype=np.float32)
    tokens = run(logits, [make_row(outputs=[1] * count) for count in range(12)]).tokens()
    assert len(set(tokens)) > 6


def test_a_pooling_row_is_ignored() -> None:
    sampler = Sampler(50, MAX_ROWS, CPU)
    sampler.add_request(0, RowStart(0, "embed", [1], 1, 0, PoolingParams(), 0, ()))
    sampler.apply_staged_writes()
    assert run(make_logits(1, 1, 50), [make_row(temperature=0.0)], order=[1], sampler=sampler).errors() == {}


@pytest.mark.parametrize("params", [{}, {"top_k": 6}, {"temperature": 0.7}, {"temperature": 1.5, "top_k": 9}])
def test_frequencies_match_probabilities(params: dict[str, float]) -> None:
    """Chi-square over fixed seeds; the bound is the 99.9 % point."""
    line, draws = make_logits(7, 1, 10)[0] / 2, 12_000
    row = make_row(**params)
    kept = reference.narrow(line, row.params).astype(np.float64)
    probabilities = np.exp(kept - kept.max()) / np.exp(kept - kept.max()).sum()
    # The same row many times in one batch, each line with its own seed: cheaper than many batches.
    state = Rows.empty()
    state.place(0, row)
    wide = Rows(*(tensor[:1].repeat_interleave(draws + 1, 0) for tensor in vars(state).values()))
    wide.seeds[:] = torch.arange(draws + 1)
    sampler = Sampler(10, draws, CPU)
    for index in range(draws):
        sampler.add_request(index, start_of(index, row))
    sampler.apply_staged_writes()
    everyone = list(range(draws))
    counts = np.bincount(sample(sampler, torch.tensor(line).repeat(draws, 1), everyone, wide).tokens(), minlength=10)
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities[probabilities > 0] * draws
    statistic = ((counts[probabilities > 0] - expected) ** 2 / expected).sum()
    assert statistic < [0, 10.8, 13.8, 16.3, 18.5, 20.5, 22.5, 24.3, 26.1, 27.9][len(expected) - 1]
