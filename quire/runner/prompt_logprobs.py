"""Logits for the rows that need them, and log-probabilities of prompt tokens, chunk by chunk as prompts come."""

from __future__ import annotations

from bisect import bisect_left
from contextlib import nullcontext

import torch
from torch import Tensor

from quire.layers.adapters import AdapterTokens
from quire.models.base import Model
from quire.ops.base import Target
from quire.ops.logprobs import LOGPROBS
from quire.runner.request_rows import RequestRows
from quire.runner.sampling.logprobs import prompt_logprobs
from quire.types.sampling import SamplingParams
from quire.types.step import RowStart, StepPlan, TokenLogprobs


class LogitsHead:
    """Pads rows to the sizes that the self-check proved invariant."""

    def __init__(self, model: Model, ladder: list[int], adapters: AdapterTokens | None = None) -> None:
        self._model, self._ladder, self._adapters = model, ladder, adapters

    @property
    def max_rows(self) -> int:
        return self._ladder[-1] if self._ladder else 256

    def __call__(self, hidden: Tensor, rows: Tensor | None = None, whole: bool = True) -> Tensor:
        """Logits of hidden [m, hidden]: [m, vocab] in the model's type. At most `max_rows` of them.

        Without `whole` they are of this rank's slice of the vocabulary. rows [m] int64: whose adapters count; None:
        nobody's.
        """
        count = hidden.shape[0]
        if self._ladder:
            padding = self._ladder[bisect_left(self._ladder, count)] - count
            hidden = torch.nn.functional.pad(hidden, (0, 0, 0, padding))
        adapters = None if rows is None else self._adapters
        with nullcontext() if adapters is None or rows is None else adapters.of_samples(rows, len(hidden)):
            return self._model.compute_logits(hidden, whole)[:count]


class PromptLogprobs:
    def __init__(self, rows: RequestRows, head: LogitsHead, *, has_logits: bool = True) -> None:
        """`has_logits`: not of a stage of a pipeline before the last, where nobody is given any."""
        self._rows, self._head, self._has_logits = rows, head, has_logits
        self._gather = LOGPROBS.bind(Target(rows.token_ids.device.type))
        self._wanted: dict[int, tuple[int, int]] = {}  # row -> (how many, prompt length)

    def add_request(self, start: RowStart) -> None:
        params = start.params
        if self._has_logits and isinstance(params, SamplingParams) and params.prompt_logprobs is not None:
            self._wanted[start.row] = (params.prompt_logprobs, start.num_prompt_tokens)

    def remove_request(self, row: int) -> None:
        self._wanted.pop(row, None)

    def wants(self, rows: list[int]) -> bool:
        """Whether one of these rows asks for them."""
        return bool(self._wanted) and not self._wanted.keys().isdisjoint(rows)

    def compute(self, plan: StepPlan, starts: list[int], hidden: Tensor) -> dict[int, list[TokenLogprobs]]:
        """For each wanting row, entries of the prompt tokens that follow the positions of this step.

        starts: index of each row's first token among hidden [n, hidden], which holds every token if a row wants any.
        """
        if not self.wants(plan.rows):
            return {}
        results: dict[int, list[TokenLogprobs]] = {}
        for index, row in enumerate(plan.rows):
            if row not in self._wanted:
                continue
            top, prompt_length = self._wanted[row]
            position = self._rows.host_num_computed[row]
            count = min(plan.num_tokens[index], prompt_length - 1 - position)
            if count > 0:
                results[index] = self._row(hidden, starts[index], row, position, count, top)
        return results

    def _row(self, hidden: Tensor, start: int, row: int, position: int, count: int, top: int) -> list[TokenLogprobs]:
        entries: list[TokenLogprobs] = []
        for offset in range(0, count, self._head.max_rows):
            size = min(self._head.max_rows, count - offset)
            first = start + offset
            logits = self._head(hidden[first : first + size], torch.full((size,), row, device=hidden.device))
            target = self._rows.token_ids[row, position + offset + 1 : position + offset + size + 1]
            entries += prompt_logprobs(self._gather, logits, target.long(), top)
        return entries
