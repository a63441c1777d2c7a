"""The host drafters: what they guess was seen before, memory is bounded, and tenants are apart."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.groups import SpeculativeConfig
from quire.config.speculative import METHODS, PROPOSING
from quire.kv.manager import KVCacheManager
from quire.sched.drafters.forced import ForcedDrafter
from quire.sched.drafters.index import TokenIndex
from quire.sched.drafters.ngram import NgramDrafter
from quire.sched.drafters.prediction import PredictionDrafter
from quire.sched.drafters.registry import DRAFTERS
from quire.sched.drafters.suffix import PastOutputs, SuffixDrafter
from quire.sched.request import Request
from tests.sched.driver import Driver, make_request

FEW = st.lists(st.integers(0, 3), min_size=1, max_size=60)
NGRAM = SpeculativeConfig(method="ngram", prompt_lookup_min=2, prompt_lookup_max=4)
SUFFIX = SpeculativeConfig(method="suffix")


def a_request(tokens: list[int], num_prompt_tokens: int | None = None, **extra: object) -> Request:
    kv: KVCacheManager = Driver().kv
    request = make_request("a", tokens, 500, num_prompt_tokens=num_prompt_tokens, **extra)
    return Request(request, kv.open(request), (0, 0), 1000)


def grow(request: Request, token: int) -> None:
    request.token_ids.append(token)
    request.num_tokens += 1


def test_every_method_has_a_drafter_and_every_drafter_its_fields() -> None:
    assert set(DRAFTERS) <= METHODS.keys()
    for name in DRAFTERS:
        drafter = DRAFTERS.get(name)(SpeculativeConfig(method=name))
        assert drafter.name == ("proposed" if name in PROPOSING else name)


@given(FEW, st.integers(1, 3), st.integers(2, 8))
def test_the_index_finds_what_a_search_finds(tokens: list[int], size: int, longest: int) -> None:
    index = TokenIndex(tokens, size, len(tokens))
    index.catch_up()
    found = index.find(tokens, max(size, longest), 1000)
    gram = tokens[-size:]
    expected = [end for end in range(size, len(tokens)) if tokens[end - size : end] == gram]
    assert [match.end for match in found] == (expected[::-1] if len(tokens) >= size else [])
    for match in found:
        assert tokens[match.end - match.length : match.end] == tokens[len(tokens) - match.length :]


def test_a_long_prompt_is_indexed_in_parts() -> None:
    tokens = [draw.randrange(1000) for draw in [random.Random(1)] for _ in range(10_000)]
    index = TokenIndex(tokens, 2, len(tokens))
    seen = []
    while index.num_indexed < len(tokens):
        index.catch_up()
        seen.append(index.num_indexed)
    assert seen == [4097, 8193, 10_000]


@given(FEW, st.integers(0, 5), st.integers(1, 8))
def test_an_ngram_guess_is_what_followed_before(tokens: list[int], num_in_flight: int, limit: int) -> None:
    """The guess, behind the tokens in flight that it implies, continues the text as one of its parts went on."""
    drafter = NgramDrafter(NGRAM)
    request = a_request(tokens)
    drafter.open(request)
    guess = drafter.propose(request, num_in_flight, limit)
    repeated = any(tokens[end - 2 : end] == tokens[-2:] for end in range(2, len(tokens)))
    assert bool(guess) == repeated
    if not guess:
        return
    assert len(guess) == limit
    whole = drafter.propose(request, 0, num_in_flight + limit)
    assert whole[num_in_flight:] == guess
    text = [*tokens, *whole]
    assert any(
        tokens[end - 2 : end] == tokens[-2:] and text[end : end + len(whole)] == whole
        for end in range(2, len(tokens))
    )
    drafter.close(request)


def test_the_longest_ngram_wins() -> None:
    drafter = NgramDrafter(NGRAM)
    request = a_request([9, 1, 2, 3, 50, 8, 2, 3, 60, 9, 1, 2, 3])
    drafter.open(request)
    assert drafter.propose(request, 0, 1) == [50]
    grow(request, 50)
    assert drafter.propose(request, 0, 2) == [8, 2]


@given(FEW, FEW, st.integers(0, 4), st.integers(1, 8))
def test_a_predicted_guess_is_a_part_of_the_prediction(
    predicted: list[int], outputs: list[int], num_in_flight: int, limit: int
) -> None:
    drafter = PredictionDrafter()
    request = a_request([7], prediction=predicted)
    assert drafter.open(request)
    for token in outputs:
        guess = drafter.propose(request, num_in_flight, limit)
        starts = range(len(predicted) - len(guess) + 1)
        assert any(predicted[start : start + len(guess)] == guess for start in starts)
        grow(request, token)
    drafter.close(request)


@given(st.lists(st.integers(0, 500), min_size=30, max_size=80, unique=True), st.data())
def test_a_prediction_goes_on_after_some_words_differ(predicted: list[int], data: st.DataObject) -> None:
    """Words replaced, left out or put in: after them it goes on within two tokens."""
    place = data.draw(st.integers(0, len(predicted) - 12))
    left_out = data.draw(st.integers(0, 6))
    put_in = data.draw(st.lists(st.integers(501, 600), max_size=6))
    said = [*predicted[:place], *put_in, *predicted[place + left_out :]]
    drafter = PredictionDrafter()
    request = a_request([7], prediction=predicted)
    drafter.open(request)
    num_right = 0
    for token in said:
        guess = drafter.propose(request, 0, 1)
        num_right += guess == [token]
        grow(request, token)
    assert num_right >= len(said) - len(put_in) - 3


@pytest.mark.parametrize(
    ("said", "guesses"),
    [
        ([1, 2, 90, 4, 5], [1, 2, 3, None, 5]),  # a token in another's place: one that comes as predicted is enough
        ([1, 2, 4, 5, 6], [1, 2, 3, 5, 6]),  # one left out: seen at once
        ([1, 2, 90, 3, 4], [1, 2, 3, None, 4]),  # one put in
        ([1, 90, 91, 92, 93, 6, 7], [1, 2, None, None, None, None, 7]),  # several replaced
        ([1, 2, 12, 13, 14], [1, 2, 3, None, 14]),  # a jump farther away: two tokens as predicted
    ],
)
def test_how_soon_a_prediction_goes_on(said: list[int], guesses: list[int | None]) -> None:
    drafter = PredictionDrafter()
    request = a_request([70], prediction=[*range(1, 20)])
    drafter.open(request)
    found = []
    for token in said:
        found.append(next(iter(drafter.propose(request, 0, 1)), None))
        grow(request, token)
    assert found == guesses


def test_a_place_that_one_token_told_is_not_trusted_twice() -> None:
    """Where the next token differs again, the last tokens are looked for in all of the prediction."""
    drafter = PredictionDrafter()
    request = a_request([70], prediction=[1, 2, 3, 9, 4, 5, 6, 7, 8, 10, 11, 9, 12, 13])
    drafter.open(request)
    for token in (1, 2, 9, 12):
        drafter.propose(request, 0, 1)
        grow(request, token)
    assert drafter.propose(request, 0, 1) == [13]


def test_a_request_without_a_prediction_has_no_guesses() -> None:
    drafter = PredictionDrafter()
    assert not drafter.open(a_request([1, 2]))


@given(st.lists(FEW, max_size=6), FEW, st.integers(1, 8))
def test_a_suffix_guess_is_what_followed_somewhere(past: list[list[int]], known: list[int], limit: int) -> None:
    guess = suffix_guess(past, known, limit)
    assert -1 not in guess
    seen = [known, *past]
    follows = [
        tokens[end : end + len(guess)]
        for tokens in seen
        for end in range(2, len(tokens))
        if tokens[end - 2 : end] == known[-2:]
    ]
    assert not guess or guess in follows


def test_the_continuation_that_came_most_often_wins() -> None:
    drafter = SuffixDrafter(SUFFIX)
    for last in (5, 6, 6):
        ended = a_request([9, 1, 2, 3, last, 7], 1)
        drafter.open(ended)
        drafter.close(ended)
    request = a_request([1, 2, 3])
    drafter.open(request)
    assert drafter.propose(request, 0, 9) == [6, 7]
    assert drafter.propose(request, 1, 9) == [7]


def test_no_guess_crosses_tenants_or_salts() -> None:
    drafter = SuffixDrafter(SUFFIX)
    ended = a_request([9, 1, 2, 3, 4], 1, tenant="a", cache_salt="s")
    drafter.open(ended)
    drafter.close(ended)
    guesses = {}
    for tenant in ("a", "b", None):
        for salt in ("s", "t", None):
            request = a_request([1, 2], tenant=tenant, cache_salt=salt)
            drafter.open(request)
            guesses[tenant, salt] = drafter.propose(request, 0, 2)
    assert guesses.pop(("a", "s")) == [3, 4]
    assert not any(guesses.values())


def test_past_outputs_take_bounded_memory() -> None:
    drafter = SuffixDrafter(SpeculativeConfig(method="suffix"), max_tokens=4096)
    draw = random.Random(0)
    for number in range(300):
        outputs = [draw.randrange(1000) for _ in range(draw.choice([3, 50, 900, 5000]))]
        ended = a_request([1, *outputs], 1, tenant=str(draw.randrange(40)) if number % 3 else "one")
        drafter.open(ended)
        drafter.close(ended)
        kept = [generation for past in drafter._past.values() for generation in past.generations]
        assert sum(len(generation.tokens) for generation in kept) <= drafter.capacity <= 4096
        assert all(len(generation.index._heads) <= 4 * max(512, generation.capacity) for generation in kept)
    assert not drafter._own


@pytest.mark.parametrize("most", [2, 10])
def test_as_many_past_outputs_as_were_asked_for(most: int) -> None:
    past = PastOutputs(most, 1 << 20)
    for _ in range(50):
        past.add([1, 2, 3])
        assert sum(generation.num_requests for generation in past.generations) <= most


def test_forced_tokens_are_cut_where_the_output_stands() -> None:
    forced = (2, [5, 6, 7, 8])
    drafter = ForcedDrafter(lambda request_id: forced)
    request = a_request([1, 1, 1, 30, 31], 3)
    assert drafter.propose(request, 0, 9) == [5, 6, 7, 8]
    assert drafter.propose(request, 1, 2) == [6, 7]
    grow(request, 5)
    assert drafter.propose(request, 0, 9) == [6, 7, 8]
    assert drafter.propose(request, 3, 9) == []
    grow(request, 9)
    assert drafter.propose(request, 0, 9) == []


def test_forced_tokens_may_begin_behind_drafts_in_flight() -> None:
    drafter = ForcedDrafter(lambda request_id: (5, [5, 6, 7]))
    request = a_request([1, 1, 1, 30], 3)
    assert drafter.propose(request, 5, 9) == [6, 7], "four drafts and the token behind them are in flight"
    assert drafter.propose(request, 3, 9) == []


def suffix_guess(past: list[list[int]], known: list[int], limit: int = 9, **fields: float) -> list[int]:
    """What outputs of the past make a drafter of these settings guess."""
    drafter = SuffixDrafter(SpeculativeConfig(method="suffix", **fields))
    for outputs in past:
        ended = a_request([9, *outputs], 1)
        drafter.open(ended)
        drafter.close(ended)
    request = a_request(known)
    drafter.open(request)
    return drafter.propose(request, 0, limit)


def test_the_settings_of_suffix_are_kept() -> None:
    past = list(range(1, 30))
    assert suffix_guess([past], [3, 4, 5, 6]) == [7, 8, 9, 10], "as many as tokens are equal"
    assert suffix_guess([past], [3, 4, 5, 6], suffix_decoding_max_spec_factor=0.5) == [7, 8]
    assert suffix_guess([past], [3, 4, 5, 6], suffix_decoding_max_tree_depth=3) == [7, 8, 9]
    assert suffix_guess([past], [3, 4, 5, 6], suffix_decoding_max_spec_factor=1e308) == list(range(7, 16))
    seldom = [[1, 2, 3, 4 + n] for n in range(4)]
    assert len(suffix_guess(seldom, [1, 2, 3], suffix_decoding_min_token_prob=0.25)) == 1
    assert suffix_guess(seldom, [1, 2, 3], suffix_decoding_min_token_prob=0.3) == []
