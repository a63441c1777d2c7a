"""Log-probabilities of prompt tokens, for requests that ask for them, chunk by chunk as the prompt is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import Target
from quire.ops.logprobs import LOGPROBS
from quire.runner.logits import LogitsHead
from quire.runner.request_rows import RequestRows
from quire.runner.sampling.logprobs import prompt_logprobs
from quire.types.sampling import SamplingParams
from quire.types.step import RowStart, StepPlan, TokenLogprobs


class PromptLogprobs:
    def __init__(self, rows: RequestRows, head: LogitsHead) -> None:
        self._rows = rows
        self._head = head
        self._gather = LOGPROBS.bind(Target(rows.token_ids.device.type))
        self._wanted: dict[int, tuple[int, int]] = {}  # row -> (how many, prompt length)

    def add_request(self, row: int, start: RowStart) -> None:
        if isinstance(start.params, SamplingParams) and start.params.prompt_logprobs is not None:
            self._wanted[row] = (start.params.prompt_logprobs, start.num_prompt_tokens)

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
