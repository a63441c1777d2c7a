"""A vocabulary of bytes and a few words, and a speaker that says anything a grammar allows."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from quire.structured.base import Backend, Matcher
from quire.structured.sources import make_source
from quire.types.structured import GrammarLimits, StructuredOutputsParams, Vocabulary

EOS, OTHER_EOS, TOOL = 256, 257, 258
WORDS = [b'{"', b'":', b'", "', b"true", b"null", b" the", b"12", b"ab", "é".encode(), "😀".encode()]
VOCABULARY = Vocabulary(
    [*(bytes([byte]) for byte in range(256)), b"</s>", b"<eot>", b"<|tool|>", *WORDS, *[b""] * 20],
    [EOS, OTHER_EOS, TOOL],
    [EOS, OTHER_EOS],
)
NUM_WORDS = -(-len(VOCABULARY.pieces) // 32)
# What ends things is said more often, or a speaker would never come to an end.
_FAVOURITES = frozenset(b'"}],:0123456789{[') | {EOS}


@dataclass
class Said:
    text: str
    is_finished: bool


def allowed(masks: np.ndarray, line: int = 0) -> list[int]:
    bits = np.unpackbits(masks[line].view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits[: len(VOCABULARY.pieces)])]


def speak(
    backend: Backend,
    params: StructuredOutputsParams,
    seed: int = 0,
    max_tokens: int = 400,
    limits: GrammarLimits | None = None,
) -> Said:
    """Random tokens among those allowed, until the grammar ends, an end token is drawn, or it is enough."""
    rng = random.Random(seed)
    matcher = backend.compile(make_source(params, limits)).matcher()
    masks = np.zeros((1, NUM_WORDS), dtype=np.int32)
    said = b""
    for _ in range(max_tokens):
        if matcher.is_complete:
            return Said(said.decode(), True)
        backend.fill([matcher], masks)
        choices = allowed(masks)
        assert choices, f"nothing may follow {said!r}"
        favourites = [token for token in choices if token in _FAVOURITES]
        token = rng.choice(favourites if favourites and rng.random() < 0.6 else choices)
        if token in VOCABULARY.eos_token_ids:
            return Said(said.decode(), True)
        assert matcher.accept([token]), matcher.error
        said += VOCABULARY.pieces[token]
    return Said(said.decode("utf-8", "replace"), False)


def go_and_come_back(matcher: Matcher, eos: int) -> None:
    """Try tokens of the regex a(b|cd)? with a matcher at its beginning: also to its end, past it, and astray."""
    a, b, c, d, z = b"abcdz"
    for _ in range(2):
        assert matcher.try_accept(a)
        assert not matcher.try_accept(z)
        assert matcher.try_accept(c)
        assert matcher.try_accept(d)
        assert matcher.is_complete
        matcher.rollback(2)
        assert not matcher.is_complete
        assert matcher.try_accept(eos)
        matcher.rollback(2)
        assert not matcher.try_accept(b)
    assert matcher.error is None
    assert matcher.accept([a, b])
    assert matcher.is_complete
