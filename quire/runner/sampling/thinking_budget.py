"""thinking_token_budget: once an output has thought for that many tokens, the tokens that end thinking are forced.

Where thinking begins and ends is read from the row's output tokens alone, so a request gets the same tokens alone, in
a batch and after a preemption.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.platform.transfer import upload
from quire.runner.sampling.base import Feature, RowState, RowValues, sampling_params
from quire.types.sampling import MAX_THINKING_MARK, ThinkingMarks
from quire.types.step import RowStart

# Tokens that may stand before the mark that begins thinking, such as line ends; later ones are part of the answer.
_MAX_LEAD = 3
_NOT_BEGUN = -1


class ThinkingBudget(Feature):
    name = group = "thinking"
    capturable = False  # it calls torch, which a list of CPU kernel calls cannot hold

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        size = MAX_THINKING_MARK
        self._limits = RowValues(max_rows + 1, 3, torch.int64, device)  # the budget, and the length of each mark
        self._begins = RowValues(max_rows + 1, size, torch.int64, device)  # the last token first
        self._ends = RowValues(max_rows + 1, size, torch.int64, device)  # the first token first
        # Where thinking begins among the outputs of each row, whether it has ended, and after how many outputs.
        self._places = torch.full((3, max_rows + 1), _NOT_BEGUN, dtype=torch.int64, device=device)
        self._staged: dict[int, tuple[int, int, int]] = {}
        self._drafted = False  # whether rows ever had drafts, and so get several tokens a step
        self._asking: set[int] = set()
        self._vocabulary = torch.arange(vocab_size, device=device)
        self._back = torch.arange(size, device=device)
        # [1 + size, size]: where, from the last token back, token i of a mark stands if j of its tokens are written.
        written = torch.arange(1 + size, device=device).unsqueeze(1)
        self._mirrored = (written - 1 - self._back).clamp(min=0)
        self._beyond = self._back >= written

    def add_request(self, row: int, start: RowStart) -> bool:
        params = sampling_params(start)
        budget, marks = params.thinking_token_budget, params.thinking_marks
        if budget is None or marks is None or not marks.end:
            return False
        self._asking.add(row)
        self._limits.set(row, budget, len(marks.begin), len(marks.end))
        self._begins.set(row, *_padded(marks.begin[::-1]))
        self._ends.set(row, *_padded(marks.end))
        outputs = start.token_ids[start.num_prompt_tokens :]
        self._staged[row] = (*find_thinking(marks, outputs), len(outputs))
        return True

    def remove_request(self, row: int) -> None:
        if row in self._asking:
            self._asking.remove(row)
            self._limits.set(row, 0, 0, 0)
            self._staged[row] = (_NOT_BEGUN, False, 0)

    def apply_staged_writes(self) -> None:
        for values in (self._limits, self._begins, self._ends):
            values.flush()
        if self._staged:
            rows = upload(list(self._staged), self._places.device, torch.int64)
            for place, column in zip(self._places, zip(*self._staged.values(), strict=True), strict=True):
                place[rows] = upload([int(value) for value in column], self._places.device, torch.int64)
            self._staged.clear()

    def apply(self, logits: Tensor, rows: Tensor, state: RowState, ahead: Tensor | None = None) -> None:
        """Waits for the device once rows have had drafts."""
        self._drafted = self._drafted or ahead is not None
        outputs = state.num_tokens[rows] - state.num_prompt_tokens[rows]
        outputs = outputs if ahead is None else outputs + ahead
        start, ended, seen = self._places[:, rows]
        # Rows that do not ask are not followed: what is kept of them may be of another request.
        seen = torch.where(self._limits.all[2, rows] > 0, seen, outputs)
        # Of the tokens since then, a mark may end at any; where all rows have just started there are none.
        behind = max(0, int((outputs - seen).max()) - 1) if self._drafted else 0
        for back in range(behind, -1, -1):
            start, ended, token = self._follow(rows, state, torch.maximum(outputs - back, seen), start, ended)
        forced = (start >= 0) & (ended == 0) & (outputs - start >= self._limits.all[0, rows])
        forced &= (logits.gather(1, token) > -torch.inf).squeeze(1)  # a grammar may not allow it here
        logits.masked_fill_(forced.unsqueeze(1) & (self._vocabulary != token), -torch.inf)
        certain = slice(None) if ahead is None else ahead == 0
        self._places[:, rows[certain]] = torch.stack([start, ended, outputs])[:, certain]

    def _follow(
        self, rows: Tensor, state: RowState, outputs: Tensor, start: Tensor, ended: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`start` and `ended` after `outputs` tokens, and the token that would go on to end thinking, [m, 1]."""
        _, begin_length, end_length = self._limits.all[:, rows]
        begin, end = self._begins.all[:, rows].T, self._ends.all[:, rows].T  # [m, size]
        known = state.num_prompt_tokens[rows] + outputs
        last = state.token_ids[rows.unsqueeze(1), (known.unsqueeze(1) - 1 - self._back).clamp(min=0)].long()
        begins = ((begin == last) | (self._back >= begin_length.unsqueeze(1))).all(1) & (begin_length > 0)
        lead = outputs - begin_length
        start = torch.where((start < 0) & begins & (lead >= 0) & (lead <= _MAX_LEAD), outputs, start)
        thought = torch.where(start < 0, 0, outputs - start)
        # Of each row, whether its last j tokens are the first j of the mark that ends thinking.
        written = ((end.unsqueeze(1) == last[:, self._mirrored]) | self._beyond).all(2)
        counts = torch.arange(written.shape[1], device=rows.device)
        written &= counts <= thought.unsqueeze(1)
        ended = ended | (written.gather(1, end_length.unsqueeze(1)).squeeze(1) & (end_length > 0)).long()
        progress = (written & (counts < end_length.unsqueeze(1))).long().mul_(counts).amax(1, keepdim=True)
        return start, ended, end.gather(1, progress)


def find_thinking(marks: ThinkingMarks, outputs: Sequence[int]) -> tuple[int, bool]:
    """Where thinking begins among the outputs that there are already, or -1, and whether it has ended."""
    begin, end = list(marks.begin), list(marks.end)
    start = 0 if marks.is_open else _NOT_BEGUN
    if start < 0 and begin:
        leads = (lead for lead in range(_MAX_LEAD + 1) if list(outputs[lead : lead + len(begin)]) == begin)
        start = next((lead + len(begin) for lead in leads), _NOT_BEGUN)
    if start < 0:
        return start, False
    places = range(start, len(outputs) - len(end) + 1)
    return start, any(list(outputs[place : place + len(end)]) == end for place in places)


def _padded(mark: Sequence[int]) -> list[int]:
    return [*mark, *[0] * (MAX_THINKING_MARK - len(mark))]
