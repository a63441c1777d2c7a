"""Heads over the target's hidden states (EAGLE, MTP): each proposes a token at a time from what it computed before.

A head reads pairs of a hidden state and the token after it. Its rows are the target's without their first tokens, so
that pair i stands where token i of the target does, in blocks and in rotations. Pairs of drafts are computed again
once the target's hidden states are there. Where a prefix hit ends, the last pair before it was made with the token
that another request went on with: that changes what is proposed, and no token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.models.drafters.base import DraftHead
from quire.platform.transfer import upload
from quire.runner.proposers.base import NoProposer, num_valid
from quire.runner.request_rows import RequestRows
from quire.runner.runner import Runner, RunningStep
from quire.runner.stages import StageInputs
from quire.types.step import StepPlan, StepResult


class HeadProposer(NoProposer):
    follows = True

    def __init__(
        self, head: DraftHead, target: RequestRows, runner: Runner, inputs: StageInputs, *, asynchronous: bool
    ) -> None:
        """`runner` is of the head, over rows of its own; `inputs` hand it hidden states instead of embeddings."""
        self._asynchronous = asynchronous
        self._head, self._target, self.wants_hidden = head, target, not head.taps
        self._runner, self._rows, self._inputs = runner, runner.rows, inputs

    def capture_next(self) -> bool:
        return self._runner.capture_next()

    @torch.inference_mode()
    def propose(self, plan: StepPlan, result: StepResult, hidden: Tensor | None) -> dict[int, list[int]]:
        assert hidden is not None
        rows, counts, parts, first = self._rows, dict[int, int](), list[Tensor](), 0
        for index, (row, count) in enumerate(zip(plan.rows, plan.num_tokens, strict=True)):
            if index not in result.errors:
                counts[row] = num_valid(plan, result, index)
                parts.append(hidden[first : first + counts[row]])
                computed = self._target.host_num_computed[row]
                rows.host_num_computed[row] = computed - counts[row]
                # There is a pair less than there are tokens. A row that proposes nothing is not to sample.
                rows.host_num_tokens[row] = self._target.host_num_tokens[row] - (row in plan.num_proposals)
            first += count
        if not counts:
            return {}
        self._copy_rows(list(counts))
        found: dict[int, list[int]] = {row: [] for row in plan.num_proposals if row in counts}
        read = self._head.read(torch.cat(parts) if len(parts) > 1 else parts[0])
        steps = [self._run(list(counts), list(counts.values()), read)]
        drafting = [row for row in counts if row in found]
        while more := [row for row in drafting if plan.num_proposals[row] > len(steps)]:
            own = steps[-1][1].hidden
            assert own is not None
            if more != drafting:
                own = own[upload([drafting.index(row) for row in more], own.device, torch.int64)]
            steps.append(self._run(more, [1] * len(more), own[: len(more)]))
            drafting = more
        for ran, step in steps:
            given = step.result()
            if given.errors:  # steps are padded with what lies in the buffer
                self._inputs.buffer.zero_()
            for index, (row, tokens) in enumerate(zip(ran, given.token_ids, strict=True)):
                if index in given.errors:
                    found.pop(row, None)
                elif row in found:
                    found[row] += tokens
        return {index: found[row] for index, row in enumerate(plan.rows) if found.get(row)}

    def _run(self, rows: list[int], counts: list[int], hidden: Tensor) -> tuple[list[int], RunningStep]:
        self._inputs.buffer[: len(hidden)] = hidden
        step = self._runner.execute(StepPlan(0, rows, counts))
        if not self._asynchronous:  # the next step takes the place of what this one leaves on the host
            step.result()
        return rows, step

    def _copy_rows(self, row_list: Sequence[int]) -> None:
        """Make the rows on the device the target's without their first tokens."""
        mine, theirs = self._rows, self._target
        place = upload(row_list, mine.token_ids.device, torch.int64)
        computed = [mine.host_num_computed[row] for row in row_list]
        mine.token_ids[place, :-1] = theirs.token_ids[place, 1:]
        mine.numbers[:, place] = theirs.numbers[:, place]
        mine.num_tokens[place] -= 1
        mine.num_prompt_tokens[place] -= 1
        mine.num_computed[place] = upload(computed, place.device, torch.int64)
