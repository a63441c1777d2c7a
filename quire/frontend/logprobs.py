"""Turns the engine's log-probabilities (parallel lists of numbers) into the dicts that callers read."""

from __future__ import annotations

from collections.abc import Callable

from quire.types.outputs import Logprob, LogprobsAtPosition
from quire.types.step import TokenLogprobs


class LogprobsDecoder:
    """Names tokens by their text and remembers the names: the same few tokens come again and again."""

    def __init__(self, token_text: Callable[[int], str] | None) -> None:
        """`token_text` may be None where there is no tokenizer; decoded_token is then None."""
        self._token_text = token_text
        self._texts: dict[int, str] = {}  # at most one entry per token of the vocabulary

    def decode(self, position: TokenLogprobs) -> LogprobsAtPosition:
        """The sampled token first, with its own rank, then the top logprobs by rank, then tokens asked for by id."""
        token_ids, logprobs = position.token_ids, position.logprobs
        num_ranked = len(token_ids) - len(position.asked_ranks)
        chosen = token_ids[0]
        decoded = {chosen: Logprob(logprobs[0], position.rank, self._text(chosen))}
        for rank in range(1, num_ranked):
            token = token_ids[rank]
            if token != chosen:
                decoded[token] = Logprob(logprobs[rank], rank, self._text(token))
        for place, rank in enumerate(position.asked_ranks, num_ranked):
            token = token_ids[place]
            if token not in decoded:
                decoded[token] = Logprob(logprobs[place], rank, self._text(token))
        return decoded

    def _text(self, token: int) -> str | None:
        text = self._texts.get(token)
        if text is None and self._token_text is not None:
            text = self._texts[token] = self._token_text(token)
        return text
