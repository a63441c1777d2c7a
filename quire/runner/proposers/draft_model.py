"""draft_model: a smaller model of the same vocabulary says what may follow, a token at a time.

It runs steps as the target does, on rows of its own: copies of the target's, behind which it appends what it samples.
Full blocks may be found by other requests, so it computes their tokens in the step that fills them, and all others
when it is asked to propose.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.runner.proposers.base import Drafting, RunningProposer, copy_rows
from quire.runner.request_rows import RequestRows
from quire.runner.runner import Runner
from quire.types.step import RowStart, StepPlan, StepResult


class DraftModel(RunningProposer):
    def __init__(self, target: RequestRows, runner: Runner, max_tokens: int, *, asynchronous: bool) -> None:
        super().__init__(target, runner, max_tokens, asynchronous=asynchronous)
        self._block_size = runner.tables.block_size
        # By row, tokens behind its known ones, of which all but one are kept.
        self._proposed: dict[int, list[int]] = {}

    def start(self, start: RowStart) -> None:
        self._proposed.pop(start.row, None)
        self._runner.inputs.remove_request(start.row)
        self._runner.inputs.add_request(start)
        self._rows.host_num_tokens[start.row] = len(start.token_ids)
        self._rows.host_num_computed[start.row] = start.num_computed_tokens

    @torch.inference_mode()
    def propose(self, plan: StepPlan, result: StepResult, hidden: Tensor | None) -> dict[int, list[int]]:
        rows = self._rows
        wanted: dict[int, int] = {}  # row -> tokens to compute
        for index, row in enumerate(plan.rows):
            if index in result.errors:
                continue
            known, computed = self._target.host_num_tokens[row], self._target.host_num_computed[row]
            kept = rows.host_num_tokens[row] + _num_common(self._proposed.pop(row, ()), result.token_ids[index])
            kept = min(kept, rows.host_num_computed[row], known - 1)
            rows.host_num_tokens[row], rows.host_num_computed[row] = known, kept
            end = known if row in plan.num_proposals else computed // self._block_size * self._block_size
            if end > kept:
                wanted[row] = end - kept
        if not wanted:
            return {}
        copy_rows(rows, self._target, list(wanted))
        steps = [self._execute([*part], [*part.values()]) for part in _parts(wanted, self._max_tokens)]
        asked = {row: number for row, number in plan.num_proposals.items() if row in wanted}
        found = Drafting(self._runner, steps, asked).get()
        for row, number in asked.items():
            rows.host_num_tokens[row] -= number
            self._proposed[row] = found.get(row, [])
        return {index: found[row] for index, row in enumerate(plan.rows) if row in found}


def _num_common(proposed: list[int] | tuple[int, ...], tokens: list[int]) -> int:
    """How many of the first tokens are as they were proposed."""
    pairs = enumerate(zip(proposed, tokens, strict=False))
    return next((n for n, (guess, token) in pairs if guess != token), min(len(proposed), len(tokens)))


def _parts(wanted: dict[int, int], most: int) -> Iterator[dict[int, int]]:
    """Steps of at most `most` tokens, which together compute `wanted[row]` tokens of each row."""
    part: dict[int, int] = {}
    left = most
    for row, count in wanted.items():
        while count:
            part[row] = min(count, left)
            count, left = count - part[row], left - part[row]
            if not left:
                yield part
                part, left = {}, most
    if part:
        yield part
