"""Token counts of a request, added up while outputs come in; each API puts them into its own form."""

from __future__ import annotations

from quire.types.outputs import RequestOutput


class UsageCounter:
    """Counts over all prompts, completions and turns of one HTTP request."""

    __slots__ = (
        "_cached",
        "_no_state",
        "_predicted",
        "_prompts",
        "_reasoning",
        "completion_tokens",
        "has_prediction",
    )

    def __init__(self, *, has_prediction: bool = False) -> None:
        """`has_prediction`: the request said what its answer will be like."""
        self.has_prediction = has_prediction
        self._predicted: dict[tuple[str, int], tuple[int, int]] = {}
        self._prompts: dict[str, int] = {}
        self._cached: dict[str, int] = {}
        self._no_state: dict[str, int] = {}
        self._reasoning: dict[tuple[str, int], int] = {}
        self.completion_tokens = 0

    @property
    def prompt_tokens(self) -> int:
        return sum(self._prompts.values())

    @property
    def cached_tokens(self) -> int:
        """Of the prompt tokens, those of cached prefixes; known with a prompt's first output token."""
        return sum(self._cached.values())

    @property
    def no_state_tokens(self) -> int:
        """Prompt tokens whose blocks were cached, but no state of recurrent layers to go on from."""
        return sum(self._no_state.values())

    @property
    def reasoning_tokens(self) -> int:
        return sum(self._reasoning.values())

    @property
    def accepted_prediction_tokens(self) -> int:
        """Tokens of the prediction that were drafts and held."""
        return sum(accepted for accepted, _ in self._predicted.values())

    @property
    def rejected_prediction_tokens(self) -> int:
        """Tokens of the prediction that were drafts and did not hold."""
        return sum(rejected for _, rejected in self._predicted.values())

    def add_prompt(self, output: RequestOutput) -> None:
        """Take in the prompt of a delta, and nothing that was generated."""
        self._prompts[output.request_id] = len(output.prompt_token_ids)
        self._cached[output.request_id] = output.num_cached_tokens or 0
        self._no_state[output.request_id] = output.metrics.num_without_state

    def add(self, output: RequestOutput) -> None:
        """Take in a delta, or a whole output."""
        self.add_prompt(output)
        for completion in output.outputs:
            self.completion_tokens += len(completion.token_ids)
            if completion.num_reasoning_tokens:
                self._reasoning[output.request_id, completion.index] = completion.num_reasoning_tokens
            predicted = completion.num_accepted_predictions, completion.num_rejected_predictions
            if any(predicted):
                self._predicted[output.request_id, completion.index] = predicted
