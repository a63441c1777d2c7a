"""Grammars for the tiny models: most of their tokens stand for a printable character."""

from __future__ import annotations

from quire.structured.sources import make_source
from quire.types.structured import GrammarSource, StructuredOutputsParams, Vocabulary
from tests.e2e.tiny import VOCAB

EOS = 2
_CHARACTERS = [bytes([code]) for code in range(32, 127)]
VOCABULARY = Vocabulary(
    [b"<pad>", b"<s>", b"</s>", *_CHARACTERS, *(b"%d;" % index for index in range(VOCAB - 3 - len(_CHARACTERS)))],
    [0, 1, EOS],
    [EOS],
)


def regex(pattern: str) -> GrammarSource:
    return make_source(StructuredOutputsParams(regex=pattern))


def text_of(token_ids: list[int]) -> str:
    return b"".join(VOCABULARY.pieces[token] for token in token_ids if token != EOS).decode()
