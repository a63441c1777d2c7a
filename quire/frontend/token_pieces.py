"""The bytes that each token stands for, taken from a tokenizer's decoder; text is their UTF-8 decoding.

Knows tokens one at a time. Decoding a list and decoding a stream are both built on this, so they agree.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import tokenizers

_METASPACE = "\u2581"

# The part of a decoder's result that one token contributes: (token string) -> bytes.
PieceFn = Callable[[str], bytes]


class PieceTable(dict[int, bytes]):
    """Token id -> bytes, filled on first use. Ids outside the vocabulary stand for nothing."""

    def __init__(self, compute: Callable[[int], bytes]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, token_id: int) -> bytes:
        piece = self._compute(token_id)
        self[token_id] = piece
        return piece


class TokenPieces:
    """Pieces in the middle of a text (`pieces`) and as its first token (`first_pieces`).

    The two differ for SentencePiece vocabularies, whose first word carries a space that is not part
    of the text.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._middle, self._first = _piece_functions(backend)
        self.pieces = PieceTable(lambda token_id: self._piece(token_id, self._middle))
        self.first_pieces = PieceTable(lambda token_id: self._piece(token_id, self._first))

    def token(self, token_id: int) -> str | None:
        """The vocabulary's spelling; any integer may be asked for, the library takes 32 bits only."""
        token: str | None = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        return token

    def _piece(self, token_id: int, function: PieceFn) -> bytes:
        token = self.token(token_id)
        return b"" if token is None else function(token)


def _piece_functions(backend: tokenizers.Tokenizer) -> tuple[PieceFn, PieceFn]:
    """Read the decoder's steps; a decoder with a step not known here is asked token by token instead."""
    decoder = backend.decoder
    steps = _flatten(json.loads(decoder.__getstate__())) if decoder is not None else []
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return byte_level_piece, byte_level_piece
    if kinds == ["Metaspace"]:
        return _metaspace(steps[0])
    if (
        kinds
        and kinds[0] == "Replace"
        and kinds[1:]
        in (
            ["ByteFallback", "Fuse"],
            ["ByteFallback", "Fuse", "Strip"],
        )
    ):
        sentencepiece = _sentencepiece(steps)
        if sentencepiece is not None:
            return sentencepiece
    return _asked(backend)


def _flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] == "Sequence":
        return [inner for part in step["decoders"] for inner in _flatten(part)]
    return [step]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable Latin-1 bytes are themselves, the rest follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(0x100) if byte not in alphabet.values())
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


BYTE_OF = _byte_alphabet()


def byte_level_piece(token: str) -> bytes:
    # A token with any character outside the alphabet is an added token, whose text is meant as it is.
    try:
        return bytes([BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()


def _sentencepiece(steps: list[dict[str, Any]]) -> tuple[PieceFn, PieceFn] | None:
    pattern = steps[0]["pattern"].get("String")
    content = steps[0]["content"]
    strip: dict[str, Any] = steps[3] if len(steps) == 4 else {"content": " ", "start": 0, "stop": 0}
    if pattern is None or strip["content"] != " " or strip["start"] > 1 or strip["stop"]:
        return None

    def middle(token: str) -> bytes:
        token = token.replace(pattern, content)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                return token.encode()
        return token.encode()

    if not strip["start"]:
        return middle, middle
    return middle, lambda token: middle(token).removeprefix(b" ")


def _metaspace(step: dict[str, Any]) -> tuple[PieceFn, PieceFn]:
    replacement = step.get("replacement", _METASPACE)
    drops_first = step.get("prepend_scheme", "always") != "never"
    return (
        lambda token: token.replace(replacement, " ").encode(),
        lambda token: token.replace(replacement, "" if drops_first else " ").encode(),
    )


def _asked(backend: tokenizers.Tokenizer) -> tuple[PieceFn, PieceFn]:
    """For any decoder that works token by token: what it adds after some other token."""
    anchor = "a"  # a decoder sees spellings only, so any plain letter does, in the vocabulary or not

    def join(tokens: list[str]) -> str:
        return " ".join(tokens) if backend.decoder is None else str(backend.decoder.decode(tokens))

    prefix = len(join([anchor]))
    return (
        lambda token: join([anchor, token])[prefix:].encode(),
        lambda token: join([token]).encode(),
    )
