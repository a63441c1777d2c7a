"""Token counts as OpenAI's `usage` object."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from quire.server.generation.usage import UsageCounter


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int
    no_state_tokens: int | UnsetType = UNSET  # told only where there are some: why a hybrid model missed


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def usage_of(counter: UsageCounter) -> Usage:
    return Usage(
        counter.prompt_tokens,
        counter.completion_tokens,
        counter.prompt_tokens + counter.completion_tokens,
        PromptTokensDetails(counter.cached_tokens, counter.no_state_tokens or UNSET),
        CompletionTokensDetails(
            counter.reasoning_tokens,
            counter.accepted_prediction_tokens if counter.has_prediction else UNSET,
            counter.rejected_prediction_tokens if counter.has_prediction else UNSET,
        ),
    )
