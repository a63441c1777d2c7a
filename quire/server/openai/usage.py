"""Token counts of a request, as OpenAI's `usage` object; added up while outputs come in."""

from __future__ import annotations

import msgspec

from quire.types.outputs import RequestOutput


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class UsageCounter:
    """Counts over all prompts and completions of one HTTP request."""

    __slots__ = ("_cached", "_prompts", "_reasoning", "completion_tokens")

    def __init__(self) -> None:
        self._prompts: dict[str, int] = {}
        self._cached: dict[str, int] = {}
        self._reasoning: dict[tuple[str, int], int] = {}
        self.completion_tokens = 0

    def add_prompt(self, output: RequestOutput) -> None:
        """Take in the prompt of a delta, and nothing that was generated."""
        self._prompts[output.request_id] = len(output.prompt_token_ids)
        self._cached[output.request_id] = output.num_cached_tokens or 0

    def add(self, output: RequestOutput) -> None:
        """Take in a delta, or a whole output."""
        self.add_prompt(output)
        for completion in output.outputs:
            self.completion_tokens += len(completion.token_ids)
            if completion.num_reasoning_tokens:
                self._reasoning[output.request_id, completion.index] = completion.num_reasoning_tokens

    def usage(self) -> Usage:
        prompt_tokens = sum(self._prompts.values())
        return Usage(
            prompt_tokens,
            self.completion_tokens,
            prompt_tokens + self.completion_tokens,
            PromptTokensDetails(sum(self._cached.values())),
            CompletionTokensDetails(sum(self._reasoning.values())),
        )
