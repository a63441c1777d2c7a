"""A long text that is encoded in pieces has the tokens that it has as a whole, and is refused if it has too many."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend import tokenizer as tokenizer_module
from quire.frontend.long_text import LongText
from quire.frontend.token_bound import TokenBound
from quire.frontend.tokenizer import Tokenizer, TooManyTokensError
from tests.frontend.test_token_bound import SUSPECT_TEXTS, backends
from tests.frontend.text_helpers import CORPUS, TEXTS

# Text as people write it has a place to cut at every few words.
PROSE = st.lists(st.one_of(TEXTS, st.sampled_from(CORPUS[:4])), min_size=1, max_size=8).map(" and then ".join)
NAMES = [
    "gpt-2",
    "smollm",
    "llama-bpe",
    "qwen2",
    "gpt-4o",
    "llama",
    "llama without prefix",
    "stripping",
    "incomplete",
]


@functools.cache
def in_pieces(name: str) -> Tokenizer:
    """A tokenizer that takes everything over 60 characters for long."""
    made = Tokenizer(backends()[name])
    made.__dict__["_bound"] = TokenBound.of(made.backend, piece=50)
    made.__dict__["_long_text"] = LongText(made._encode_piece, piece=40, max_piece=4000)
    return made


@pytest.fixture(autouse=True, scope="module")
def short_is_long() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "LONG_TEXT", 60)
        yield


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(text=PROSE, add_special_tokens=st.booleans(), keep=st.integers(1, 40))
def test_pieces_have_the_tokens_of_the_whole(name: str, text: str, add_special_tokens: bool, keep: int) -> None:
    whole = backends()[name].encode(text, add_special_tokens=add_special_tokens).ids
    assert in_pieces(name).encode(text, add_special_tokens) == whole
    assert in_pieces(name).encode(text, add_special_tokens, keep_last=keep)[-keep:] == whole[-keep:]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(text=st.one_of(PROSE, SUSPECT_TEXTS), limit=st.integers(0, 300))
def test_no_text_is_refused_that_would_be_accepted_as_a_whole(name: str, text: str, limit: int) -> None:
    whole = backends()[name].encode(text, add_special_tokens=False).ids
    if len(whole) <= limit:
        assert in_pieces(name).encode(text, False, max_tokens=limit) == whole
        return
    with pytest.raises(TooManyTokensError) as caught:
        in_pieces(name).encode(text, False, max_tokens=limit)
    assert limit < caught.value.num_tokens <= len(whole)
    assert not caught.value.exact or caught.value.num_tokens == len(whole)


def test_text_without_a_place_to_cut_is_cut_all_the_same() -> None:
    pieces = list(LongText(Tokenizer(backends()["bytes"])._encode_piece, piece=10, max_piece=40).pieces("x" * 100))
    assert [(len(piece), exact) for piece, exact in pieces] == [(40, False), (40, False), (20, True)]
