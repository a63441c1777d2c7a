"""Log-probabilities in the shapes of the two endpoints, and in vLLM's shape for prompts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import msgspec

from quire.frontend.tokenizer import Tokenizer
from quire.types.outputs import Logprob, LogprobsAtPosition

# What JSON can say instead of minus infinity.
_LEAST = -9999.0


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one entry per token of the text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str | None


class LogprobsFormatter:
    """Names tokens for one request."""

    def __init__(self, tokenizer: Tokenizer, as_token_ids: bool, asked: Collection[int] = ()) -> None:
        """`asked`: token ids that the request names, which are shown besides the top ones."""
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids
        self._asked = frozenset(asked)

    def chat(self, positions: Iterable[LogprobsAtPosition], num_top: int) -> ChatLogprobs:
        """With the top `num_top` logprobs of each position, -1 for all, and those of the tokens asked for by id."""
        content = []
        for position in positions:
            # The sampled token comes first, then the top logprobs by rank; it may be one of them.
            (chosen, chosen_logprob), *_ = position.items()
            ranked = sorted(position.items(), key=lambda item: item[1].rank or 0)
            shown = ranked if num_top < 0 else ranked[:num_top]
            if self._asked and num_top >= 0:
                shown += [item for item in ranked[num_top:] if item[0] in self._asked]
            top = [self._top(token, logprob) for token, logprob in shown]
            entry = self._top(chosen, chosen_logprob)
            content.append(ChatLogprob(entry.token, entry.logprob, entry.bytes, top))
        return ChatLogprobs(content)

    def completion(
        self, token_ids: Sequence[int], positions: Iterable[LogprobsAtPosition | None], offset: int
    ) -> tuple[CompletionLogprobs, int]:
        """The lists for these tokens, whose text begins at `offset`, and the offset after them."""
        result = CompletionLogprobs([], [], [], [])
        for token, position in zip(token_ids, positions, strict=True):
            result.text_offset.append(offset)
            offset += len(self._tokenizer.token_text(token))
            result.tokens.append(self._name(token))
            if position is None:
                result.token_logprobs.append(None)
                result.top_logprobs.append(None)
                continue
            result.token_logprobs.append(_finite(position[token].logprob))
            top: dict[str, float] = {}
            for other, logprob in position.items():  # the chosen token first, as in vLLM, then by rank
                top.setdefault(self._name(other), _finite(logprob.logprob))
            result.top_logprobs.append(top)
        return result, offset

    def _top(self, token: int, logprob: Logprob) -> TopLogprob:
        return TopLogprob(self._name(token), _finite(logprob.logprob), list(self._tokenizer.token_bytes(token)))

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_token_ids else self._tokenizer.token_text(token)


def concatenated(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        first.text_offset + second.text_offset,
        first.token_logprobs + second.token_logprobs,
        first.tokens + second.tokens,
        first.top_logprobs + second.top_logprobs,
    )


def prompt_logprobs(
    positions: Sequence[LogprobsAtPosition | None] | None,
) -> list[dict[int, PromptLogprob] | None] | None:
    """vLLM's `prompt_logprobs`: for each prompt token after the first, the candidates by token id."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {token: PromptLogprob(_finite(p.logprob), p.rank, p.decoded_token) for token, p in position.items()}
        for position in positions
    ]


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST
