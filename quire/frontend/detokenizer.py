"""Turns a stream of token ids into a stream of text; knows one request's tokens and nothing of stop strings.

The text of an output is what it adds to its prompt: with `bytes(ids)` the concatenated pieces of the tokens, the
deltas join to the UTF-8 decoding of `bytes(prompt + output)` less that of the prompt's complete characters.
Every maximal invalid sequence becomes one U+FFFD as soon as it can no longer be completed.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from quire.frontend.tokenizer import Tokenizer

_MAX_UTF8_LENGTH = 4


class IncrementalDetokenizer:
    """`add` costs a table look-up per token; only an unfinished character (at most 3 bytes) is held back."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._pieces = tokenizer.piece_table(skip_special_tokens)
        self._skip_special_tokens = skip_special_tokens
        self._joins_special_tokens = not (spaces_between_special_tokens or skip_special_tokens)
        self._after_special = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = not any(tokenizer.is_visible(token_id, skip_special_tokens) for token_id in prompt_token_ids)
        self._decoder.decode(self._tail_bytes(prompt_token_ids))

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        if self._at_start or self._joins_special_tokens:
            data = b"".join([self._next_piece(token_id) for token_id in token_ids])
        else:
            pieces = self._pieces
            data = b"".join([pieces[token_id] for token_id in token_ids])
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The output has ended: return the text of an unfinished character."""
        return self._decoder.decode(b"", True)

    def _next_piece(self, token_id: int) -> bytes:
        """The rare cases: the first token of a text, and special tokens that decoders set apart by a space."""
        token = self._tokenizer.convert_id_to_token(token_id)
        if token is None or not self._tokenizer.is_visible(token_id, self._skip_special_tokens):
            return b""
        if self._joins_special_tokens:
            after_special, self._after_special = self._after_special, self._tokenizer.is_special(token_id)
            if after_special and self._after_special:
                return token.encode()
        if self._at_start:
            self._at_start = False
            return self._tokenizer.first_piece(token_id)
        return self._pieces[token_id]

    def _tail_bytes(self, prompt_token_ids: Sequence[int]) -> bytes:
        """The last bytes of the prompt, enough to hold a character that the output may complete."""
        tail = b""
        for token_id in reversed(prompt_token_ids):
            tail = self._pieces[token_id] + tail
            if len(tail) >= _MAX_UTF8_LENGTH:
                break
        return tail[-_MAX_UTF8_LENGTH:]
