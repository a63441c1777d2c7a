"""Heads over the target's hidden states (EAGLE, MTP): each proposes a token at a time from what it computed before.

A head reads pairs of a hidden state and the token after it. Its rows are the target's without their first tokens, so
that pair i stands where token i of the target does, in blocks and in rotations. Pairs of drafts are computed again
once the target's hidden states are there. Where a prefix hit ends, the last pair before it was made with the token
that another request went on with: that changes what is proposed, and no token.

A step that is asked to propose is followed on the device, before the host knows which drafts hold: the head computes
the pairs of all of them and samples at each row's last known pair.

A step that is not asked to propose leaves its hidden states in `kept`, and the head computes their pairs later, many
at once: before it proposes again, before their blocks become another request's, and when there is no more room.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from types import MappingProxyType

import torch
from torch import Tensor

from quire.models.drafters.base import DraftHead
from quire.platform.transfer import upload
from quire.runner.forward import StepProgram
from quire.runner.inputs import InputLists
from quire.runner.proposers.base import Drafting, RunningProposer, copy_rows, valid_tokens
from quire.runner.request_rows import RequestRows
from quire.runner.runner import Runner, RunningStep
from quire.runner.stages import StageInputs
from quire.types.ledger import EngineSizes
from quire.types.step import StepPlan, StepResult

_KEPT = 16  # tokens of a row


class HeadProgram(StepProgram):
    """Steps of a head over rows some of whose last pairs are of drafts that do not hold, as only the device knows."""

    def place_drafts(self, lists: InputLists[Tensor]) -> None:
        """Sample at the last known pairs of rows."""
        known = self.rows.num_tokens[lists.sample_rows]
        past = torch.where(known > 0, lists.sample_contexts - known, 0)  # a row without known pairs is padding
        lists.sample_tokens.sub_(past)
        lists.sample_contexts.sub_(past)


class HeadProposer(RunningProposer):
    def __init__(
        self,
        head: DraftHead,
        target: RequestRows,
        runner: Runner,
        inputs: StageInputs,
        max_tokens: int,
        *,
        asynchronous: bool,
    ) -> None:
        """`inputs` hand the head hidden states instead of embeddings; the last lines of their buffer keep some."""
        super().__init__(target, runner, max_tokens, asynchronous=asynchronous)
        self.wants_hidden, self._inputs = not head.taps, inputs
        self._kept = inputs.buffer[-_KEPT * target.scratch_row :]
        self._most_kept = min(max_tokens, max(runner.step_sizes, default=max_tokens))  # of all rows: one step
        self._pending: dict[int, int] = {}  # row -> its last computed tokens whose hidden states are kept
        self._begun: tuple[StepPlan, Drafting] | None = None

    @staticmethod
    def num_kept(sizes: EngineSizes) -> int:
        """Lines of the inputs' buffer for what is kept."""
        return _KEPT * sizes.max_num_seqs

    @torch.inference_mode()
    def before(self, plan: StepPlan) -> None:
        leave = not self._pending.keys().isdisjoint(plan.freed_rows)
        if self._pending and (leave or any(start.num_computed_tokens for start in plan.starts)):
            self._compute({}, None, {})
        for row in plan.freed_rows:
            self._pending.pop(row, None)

    @torch.inference_mode()
    def begin(self, plan: StepPlan, hidden: Tensor | None) -> None:
        if plan.num_proposals:
            ends = zip(plan.num_tokens, accumulate(plan.num_tokens), strict=True)
            fresh = dict(zip(plan.rows, (range(end - count, end) for count, end in ends), strict=True))
            self._begun = plan, self._draft(fresh, hidden, plan.num_proposals)

    @torch.inference_mode()
    def propose(self, plan: StepPlan, result: StepResult, hidden: Tensor | None) -> dict[int, list[int]]:
        assert hidden is not None
        if self._begun is not None and self._begun[0] is plan:
            found = self._begun[1].get()
            # If something is not finite: steps are padded with what lies in the buffer.
            if result.errors or len(found) < len(plan.num_proposals):
                self._inputs.buffer.zero_()
            return {index: found[row] for index, row in enumerate(plan.rows) if row in found}
        for index in result.errors:
            self._pending.pop(plan.rows[index], None)
        fresh = valid_tokens(plan, result)
        if fresh and not self._keep(fresh, hidden):
            self._draft(fresh, hidden, {}).get()
        return {}

    def _draft(self, fresh: dict[int, range], hidden: Tensor | None, asked: dict[int, int]) -> Drafting:
        if self._pending and sum(map(len, fresh.values())) + sum(self._pending.values()) > self._max_tokens:
            self._compute({}, None, {}, later=fresh)
        asked = {row: asked[row] for row in fresh if row in asked}
        return Drafting(self._runner, [self._compute(fresh, hidden, asked)], asked)

    def _keep(self, fresh: dict[int, range], hidden: Tensor) -> bool:
        """Keep hidden states for later; False if there is no room."""
        first = {row: self._pending.get(row, 0) for row in fresh}
        num_tokens = sum(map(len, fresh.values()))
        if num_tokens + sum(self._pending.values()) > self._most_kept or any(
            first[row] + len(places) > _KEPT for row, places in fresh.items()
        ):
            return False
        to = [row * _KEPT + first[row] + n for row, places in fresh.items() for n in range(len(places))]
        _copy(self._kept, to, hidden, [place for places in fresh.values() for place in places])
        self._pending.update({row: first[row] + len(places) for row, places in fresh.items()})
        return True

    def _compute(
        self,
        fresh: dict[int, range],
        hidden: Tensor | None,
        asked: dict[int, int],
        later: Mapping[int, range] = MappingProxyType({}),
    ) -> tuple[list[int], RunningStep]:
        """Compute the pairs of all kept and of these hidden states, and sample for rows that are asked."""
        mine, pending = self._rows, self._pending
        rows = [*fresh, *(row for row in pending if row not in fresh)]
        counts = [pending.get(row, 0) + len(fresh.get(row, ())) for row in rows]
        kept_to, fresh_to, place = list[int](), list[int](), 0
        for row, count in zip(rows, counts, strict=True):
            mine.host_num_computed[row] = self._target.host_num_computed[row] - len(later.get(row, ())) - count
            # There is a pair less than there are tokens. A row that proposes nothing is not to sample.
            mine.host_num_tokens[row] = self._target.host_num_tokens[row] - (row in asked)
            kept_to += range(place, place + pending.get(row, 0))
            fresh_to += range(place + pending.get(row, 0), place + count)
            place += count
        mine.unsettled = dict.fromkeys(asked, 1)
        copy_rows(mine, self._target, rows, skipped=1)
        buffer = self._inputs.buffer
        if kept_to:
            lines = [row * _KEPT + n for row in rows for n in range(pending.get(row, 0))]
            _copy(buffer, kept_to, self._kept, lines)
        if hidden is not None:
            _copy(buffer, fresh_to, hidden, [place for places in fresh.values() for place in places])
        pending.clear()
        return self._execute(rows, counts)


def _copy(to: Tensor, to_lines: list[int], source: Tensor, lines: list[int]) -> None:
    """to[to_lines] = source[lines]"""
    count = len(lines)
    if to_lines == lines == list(range(count)):
        to[:count] = source[:count]
        return
    packed = upload([*to_lines, *lines], to.device, torch.int64).view(2, -1)
    to[packed[0]] = source[packed[1]]
