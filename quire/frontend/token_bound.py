"""How many tokens a text has at least, found in a fraction of the time that tokenizing it takes.

A token that covers a byte of the text covers some n-gram around that byte too, unless it is shorter than n. So no
token that covers the byte is longer than the longest token that holds one of these n-grams, and a text has at least
as many tokens as the sum of 1 / (that length) over its bytes. N-grams are looked up by hash: where two of them meet,
the longer length counts, which makes the bound weaker and never wrong.

Holds only where the tokens of a text spell it byte by byte; `TokenBound.of` is None for other vocabularies.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, Self

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import models

from quire.frontend.token_pieces import BYTE_OF, byte_level_piece

_SPACE = "\u2581"  # how SentencePiece vocabularies spell a space
_TABLE_BITS = {2: 16, 4: 18, 8: 20}  # by n of the n-grams
_EDGE = max(_TABLE_BITS) - 1  # bytes at a piece's ends that lack some of their n-grams
_WIDTH = 2 * (_EDGE + 1) + 1
_PIECE = 1 << 16  # characters looked at together: a few milliseconds
_NFC_AT_CUT = 4  # tokens: what the composition of characters across the end of a piece may save
_LOSSLESS_STEPS = frozenset({"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation", "Sequence"})

Bytes = NDArray[np.uint8]


class TokenBound:
    """Lower bounds for one vocabulary. Read-only after construction."""

    def __init__(
        self,
        tokens: list[bytes],
        *,
        normalizer: tokenizers.normalizers.Normalizer | None = None,
        spells_space: bool = False,
        strips: bool = False,
        missing: Collection[int] = (),
        piece: int = _PIECE,
    ) -> None:
        """`spells_space`: U+2581 and a space are one; `strips`: some tokens take white space beside them along.

        `missing` are bytes that the vocabulary does not have: the library leaves them out of a text.
        """
        self._tables = {n: _longest_by_ngram(tokens, n, bits) for n, bits in _TABLE_BITS.items()}
        longest = max(map(len, tokens), default=1)
        self._share = np.zeros(max(longest, _EDGE) + 1)
        self._share[1:] = 1 / np.arange(1, len(self._share))
        self._normalizer = normalizer
        self._spells_space = spells_space
        self._counts = _never_stripped() if strips else np.ones(256)
        self._missing = np.isin(np.arange(256), list(missing))
        self._piece = piece

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer, piece: int = _PIECE) -> Self | None:
        """None where a token may stand for text that it does not spell: unknown or dropped characters, say."""
        model, normalizer = backend.model, backend.normalizer
        if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
            return None
        added = backend.get_added_tokens_decoder().values()
        strips = any(token.lstrip or token.rstrip for token in added)
        spelled = [token.content.encode() for token in added]
        vocabulary = backend.get_vocab(with_added_tokens=True)
        before = _steps(backend.pre_tokenizer)
        changes = _steps(normalizer)
        if not all(step["type"] in _LOSSLESS_STEPS and step.get("behavior") != "Removed" for step in before):
            return None
        kinds = {step["type"] for step in before}
        if "ByteLevel" in kinds and "Metaspace" not in kinds:
            if any(step["type"] != "NFC" for step in changes):
                return None
            tokens = [*spelled, *map(byte_level_piece, vocabulary)]
            missing = [byte for char, byte in BYTE_OF.items() if char not in vocabulary]
            nfc = normalizer if changes else None
            return cls(tokens, normalizer=nfc, strips=strips, missing=missing, piece=piece)
        has_bytes = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
        if not model.byte_fallback or not has_bytes or "ByteLevel" in kinds or not all(map(_only_spaces, changes)):
            return None
        tokens = [*spelled, *map(_sentencepiece_piece, vocabulary)]
        return cls(tokens, spells_space=True, strips=strips, piece=piece)

    def at_least(self, text: str, enough: int) -> int:
        """A number of tokens that the text surely has. Looks no further once that is more than `enough`."""
        total = 0.0
        for begin in range(0, len(text), self._piece):
            piece = text[begin : begin + self._piece]
            if self._spells_space:
                piece = piece.replace(_SPACE, " ")
            total += self._sum(piece)
            if total > enough + 1:
                break
        return int(total)

    def _sum(self, piece: str) -> float:
        """The sum over a piece's bytes, but for those at its ends: tokens that cover these may begin outside."""
        text: Bytes = np.frombuffer(piece.encode("utf-8", "replace"), np.uint8)
        if len(text) < _WIDTH:
            return 0.0
        bound = np.full(len(text), len(self._share) - 1, np.uint16)
        for n, bits in _TABLE_BITS.items():
            found = self._tables[n][_hashes(text, n, bits)]
            longest = np.full(len(text), n - 1, np.uint16)
            for offset in range(n):
                around = longest[offset : offset + len(found)]
                np.maximum(around, found, out=around)
            np.minimum(bound, longest, out=bound)
        shares = self._share[bound] * self._counts[text]
        missing = self._missing[text]
        if missing.any():
            shares[_near(missing)] = 0  # tokens beside a byte that is left out may reach beyond it
        if self._normalizer is None or piece.isascii():
            return float(shares[_EDGE:-_EDGE].sum())
        if self._normalizer.normalize_str(piece) != piece:
            shares[_near(text >= 0x80)] = 0  # only what the normalizer surely leaves alone counts
        return max(0.0, float(shares[_EDGE:-_EDGE].sum()) - _NFC_AT_CUT)


def _near(marked: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The places that have a marked one within _EDGE + 1 of them."""
    return np.convolve(marked, np.ones(_WIDTH, np.int64), "same") > 0


def _hashes(text: Bytes, n: int, bits: int) -> NDArray[np.uint32]:
    """One for each n-gram; those of two bytes are the bytes."""
    size = len(text) - n + 1
    value = text[:size].astype(np.uint32)
    for offset in range(1, n):
        value = value * np.uint32(256 if n == 2 else 0x01000193) + text[offset : offset + size]
    return value if n == 2 else (value * np.uint32(0x9E3779B1)) >> np.uint32(32 - bits)


def _longest_by_ngram(tokens: list[bytes], n: int, bits: int) -> NDArray[np.uint16]:
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    data = np.frombuffer(b"".join(tokens), np.uint8)
    table = np.zeros(1 << bits, np.uint16)
    if len(data) >= n:
        left = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(data))  # bytes to the end of the token
        size = len(data) - n + 1
        inside = left[:size] >= n
        owners = np.repeat(lengths, lengths)[:size][inside]
        np.maximum.at(table, _hashes(data, n, bits)[inside], owners.astype(np.uint16))
    return table


def _never_stripped() -> NDArray[np.float64]:
    """1 for byte values that no white space has."""
    counts = np.ones(256)
    counts[[9, 10, 11, 12, 13, 28, 29, 30, 31, 32]] = 0
    counts[0x80:0xC0] = 0  # continuation bytes, of whatever character
    counts[[0xC2, 0xE1, 0xE2, 0xE3]] = 0  # what white space beyond ASCII begins with
    return counts


def _steps(part: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, sequences opened."""
    if part is None:
        return []
    return _flattened(json.loads(part.__getstate__()))


def _flattened(step: dict[str, Any]) -> list[dict[str, Any]]:
    inner = step.get("normalizers") or step.get("pretokenizers") or []
    return [step] if step["type"] != "Sequence" else [part for one in inner for part in _flattened(one)]


def _only_spaces(step: dict[str, Any]) -> bool:
    """Whether a normalizer's step only spells spaces otherwise, or puts one in front."""
    if step["type"] == "Prepend":
        return bool(step["prepend"] == _SPACE)
    return bool(step["type"] == "Replace" and step["pattern"] == {"String": " "} and step["content"] == _SPACE)


def _sentencepiece_piece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return token.encode()
    return token.replace(_SPACE, " ").encode()
