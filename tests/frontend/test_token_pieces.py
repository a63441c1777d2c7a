"""What each token stands for, read from every kind of decoder, against the library's own decoding."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models

from quire.frontend.token_pieces import TokenPieces

SPACE = "\u2581"
WORDS = [
    *("a", SPACE, f"{SPACE}the", f"x{SPACE}{SPACE}y", f"{SPACE}{SPACE}", "##ing", "b</w>", " ", " b", "."),
    *("\u00e9", "\u4e16", "\u0120a", "<0x41>", "<0xC3>", "<0xZZ>", "<0x4>"),
]
STEPS = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS: dict[str, Any] = {
    "none": None,
    "byte level": decoders.ByteLevel(),
    "llama": decoders.Sequence([*STEPS, decoders.Strip(" ", 1, 0)]),
    "gemma": decoders.Sequence(STEPS),
    "two stripped": decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Strip(" ", 2, 0)]),
    "regex": decoders.Sequence([decoders.Replace(Regex(SPACE), " "), *STEPS[1:]]),
    "metaspace": decoders.Metaspace(),
    "metaspace first": decoders.Metaspace(prepend_scheme="first"),
    "metaspace never": decoders.Metaspace(prepend_scheme="never"),
    "wordpiece": decoders.WordPiece(cleanup=False),
    "wordpiece cleaned": decoders.WordPiece(cleanup=True),
}


@pytest.mark.parametrize("name", DECODERS)
@given(ids=st.lists(st.integers(0, len(WORDS) - 1), min_size=1, max_size=8))
@settings(max_examples=60)
def test_pieces_join_to_what_the_library_decodes(name: str, ids: list[int]) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, "a"))
    if DECODERS[name] is not None:
        backend.decoder = DECODERS[name]
    pieces = TokenPieces(backend)
    data = pieces.first_pieces[ids[0]] + b"".join(pieces.pieces[token_id] for token_id in ids[1:])
    expected = backend.decode(ids)
    if "\ufffd" not in expected:
        assert data.decode() == expected
    else:
        assert "\ufffd" in data.decode("utf-8", "replace")


def test_ids_outside_the_vocabulary_stand_for_nothing() -> None:
    pieces = TokenPieces(tokenizers.Tokenizer(models.WordLevel({"a": 0}, "a")))
    assert [pieces.pieces[token_id] for token_id in (-1, 1, 2**40)] == [b"", b"", b""]
    assert pieces.token(2**40) is None
