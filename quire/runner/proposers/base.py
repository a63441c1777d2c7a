"""Proposer: a drafter with weights. After a step it says what may follow in the rows that the plan names.

It keeps keys and values of its own for the same tokens, in the blocks of the same tables. What it proposes is sampled
as the target samples, with the same noise, so that a proposer that knew the target's logits would always be right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.platform.transfer import upload
from quire.runner.request_rows import RequestRows
from quire.runner.step import Arriving
from quire.types.step import RowStart, StepPlan, StepResult

if TYPE_CHECKING:
    from quire.runner.runner import Runner, RunningStep


class NoProposer:
    """Steps propose nothing."""

    wants_hidden = False
    """Whether `propose` reads the last hidden states of every token of a step."""
    follows = False
    """Whether it hears of every step, before the next one is started."""

    def start(self, start: RowStart) -> None:
        """A request takes a row."""
        return None

    def before(self, plan: StepPlan) -> None:
        """A plan is about to be applied: rows that it frees, and their blocks, are still as they were."""
        return None

    def begin(self, plan: StepPlan, hidden: Tensor | None) -> None:
        """A step is in the device's queue up to its sampling: put what needs no result behind it. Does not wait."""
        return None

    def propose(self, plan: StepPlan, result: StepResult, hidden: Tensor | None) -> dict[int, list[int]]:
        """Tokens that may follow in the rows of plan.num_proposals, by index, once a step's result is known.

        The rows stand behind what the step gave. hidden [n or more, width]: what is kept of the step's tokens.
        """
        return {}

    def capture_next(self) -> bool:
        """Capture one more kind of its own steps; False if there is none."""
        return False


class RunningProposer(NoProposer):
    """A model or head that runs steps as the target does, on rows of its own."""

    follows = True

    def __init__(self, target: RequestRows, runner: Runner, max_tokens: int, *, asynchronous: bool) -> None:
        """`runner` is of the drafter; a step of it takes at most `max_tokens`."""
        self._target, self._runner, self._rows = target, runner, runner.rows
        self._max_tokens, self._asynchronous = max_tokens, asynchronous

    def capture_next(self) -> bool:
        return self._runner.capture_next()

    def _execute(self, rows: list[int], counts: list[int]) -> tuple[list[int], RunningStep]:
        step = self._runner.execute(StepPlan(0, rows, counts))
        if not self._asynchronous:  # the next step takes the place of what this one leaves on the host
            step.result()
        return rows, step


def copy_rows(mine: RequestRows, theirs: RequestRows, row_list: Sequence[int], skipped: int = 0) -> None:
    """Make rows on the device what the target's are without their first tokens, but for the tokens computed."""
    computed = [mine.host_num_computed[row] for row in row_list]
    place, num_computed = upload([*row_list, *computed], mine.token_ids.device, torch.int64).view(2, -1)
    mine.token_ids[place, : mine.token_ids.shape[1] - skipped] = theirs.token_ids[place, skipped:]
    numbers = theirs.numbers[:, place]
    numbers[:2] -= skipped  # known tokens, prompt tokens
    numbers[2] = num_computed
    mine.numbers[:, place] = numbers


def valid_tokens(plan: StepPlan, result: StepResult) -> dict[int, range]:
    """Row -> which of a step's tokens are the row's: all but drafts that do not hold. Not of rows that failed."""
    found, first = dict[int, range](), 0
    for index, (row, count, tokens) in enumerate(zip(plan.rows, plan.num_tokens, result.token_ids, strict=True)):
        drafts = plan.draft_token_ids.get(row, ())
        if index not in result.errors:
            found[row] = range(first, first + count - (1 + len(drafts) - len(tokens) if drafts and tokens else 0))
        first += count
    return found


class Drafting:
    """Tokens that a drafter samples for rows, as many as are `asked`: all its steps are in the device's queue."""

    def __init__(self, runner: Runner, steps: Sequence[tuple[list[int], RunningStep]], asked: dict[int, int]) -> None:
        """`steps`, each of some rows, have sampled the first token of each; the last has done so in the order of
        `asked`, if the drafter reads its own hidden states. Does not wait.
        """
        self._runner, self._steps, self._asked = runner, steps, asked
        self._parts: list[tuple[list[int], Arriving]] = []
        drafting, hidden, done = list(asked), steps[-1][1].hidden, 1
        while more := [row for row in drafting if asked[row] > done]:
            if hidden is not None and more != drafting:
                hidden = hidden[upload([drafting.index(row) for row in more], hidden.device, torch.int64)]
            count = min(asked[row] for row in more) - done
            sampled, hidden = runner.go_on(more, hidden, count)
            self._parts.append((more, sampled))
            drafting, done = more, done + count

    def get(self) -> dict[int, list[int]]:
        """Wait for the tokens of each row; rows that break have none."""
        runner, broken = self._runner, set[int]()
        found: dict[int, list[int]] = {row: [] for row in self._asked}
        for rows, step in self._steps:
            given = step.result()
            broken.update(rows[index] for index in given.errors)
            for row, tokens in zip(rows, given.token_ids, strict=True):
                if row in found:
                    found[row] += tokens
        for more, sampled in self._parts:
            for row, tokens in zip(more, sampled.get().transpose(0, 1).tolist(), strict=False):
                found[row] += [token for token, _ in tokens]
                broken |= {row} if any(code for _, code in tokens) else set()
        for row in broken:
            found.pop(row, None)
            runner.containment.heal(row, runner.rows.host_num_computed[row])
        return found
