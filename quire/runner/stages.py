"""A stage of a pipeline, as its runner sees it: hidden states come from the stage before and go to the next one.

The last stage samples. The first one, which alone reads tokens, gets them from it when it comes to a step that
computes them; the others need lengths, which grow by one. What else results say comes with a later plan, and with it
tokens of rows that had drafts, which are planned again afterwards. Transfers are outside of what ways capture: a step
reads a buffer at a fixed place, and leaves its result in one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.models.token_inputs import TokenInputs
from quire.ops.base import Target
from quire.ops.step import APPEND_TOKENS
from quire.parallel.pipeline import Pipeline
from quire.platform.transfer import upload
from quire.runner.request_rows import RequestRows
from quire.runner.sampling.sampler import Sampler, SamplingKind
from quire.runner.step import Step
from quire.types.ledger import EngineSizes, LedgerLine
from quire.types.step import Returned, RowStart, StepPlan, StepResult

_MOST_ON_LINK = 16  # messages that nobody needs yet; a link holds more, and the last stage waits when it is full


@dataclass
class _HandedOn:
    """A step that went on to the next stage."""

    plan: StepPlan
    starts: dict[int, int]  # RequestRows.num_starts of each of its rows
    drafted: list[tuple[int, int]]  # see RequestRows.note_drafts
    places: dict[int, int]  # where the rows of _appending_rows have the tokens that they sample
    is_known: bool = False  # these rows have them, or as much of them as this stage needs


class WholeModel:
    """The only stage: it moves nothing, and samples."""

    samples = True

    def receive(self, step: Step) -> None:
        """Get the hidden states of a step's tokens, or these tokens, from the stage before. May block."""
        return None

    def send(self, step: Step) -> None:
        """Give the step's hidden states to the next stage. May block."""
        return None

    def give_back(self, step: Step) -> None:
        """Give the tokens that the step has sampled to the first stage. May block."""
        return None

    def learn(self, returned: Iterable[Returned]) -> None:
        """What the last stage sampled in steps before."""
        return None

    def empty_link(self) -> None:
        """All steps are done: take what is still on its way."""
        return None

    def start_over(self) -> None:
        """A step failed: nothing is on its way any more."""
        return None


class Stage(WholeModel):
    def __init__(
        self, pipeline: Pipeline, rows: RequestRows, heal: Callable[[int, int], None], inputs: StageInputs | None
    ) -> None:
        """`heal` makes the blocks of a row finite again, see Containment; `inputs`: None of the first stage."""
        self.samples = pipeline.is_last
        self._link, self._rows, self._heal, self._inputs = pipeline.link, rows, heal, inputs
        self._waiting: dict[int, _HandedOn] = {}  # steps whose results have not come back, by id
        # Of the first stage: steps whose tokens the link is to bring, and the newest of them for each row.
        self._expected: deque[_HandedOn] = deque()
        self._newest: dict[int, int] = {}
        device = rows.token_ids.device
        self._append = APPEND_TOKENS.bind(Target(device.type))
        self._tokens = torch.zeros(rows.scratch_row, dtype=torch.int32, device=device)
        self._no_logits = torch.zeros(rows.scratch_row, device=device)

    def receive(self, step: Step) -> None:
        if self._inputs is not None:
            self._link.receive(self._inputs.buffer[: step.shape.num_tokens])
            return
        self._take(max(self._newest.get(row, -1) for row in step.plan.rows))
        if len(self._expected) > _MOST_ON_LINK:
            self._take(self._expected[0].plan.step_id)

    def send(self, step: Step) -> None:
        if self.samples:
            return
        assert step.every_hidden is not None
        self._link.send(step.every_hidden[: step.shape.num_tokens])
        state, plan = self._rows, step.plan
        starts = {row: state.num_starts[row] for row in plan.rows}
        sent = self._waiting[plan.step_id] = _HandedOn(plan, starts, step.drafted_rows, self._places(step))
        if sent.places and self._inputs is None:
            self._expected.append(sent)
            self._newest.update(dict.fromkeys(sent.places, plan.step_id))
        elif sent.places:
            self._append_to(list(sent.places))  # any tokens: only lengths matter behind the first stage
            sent.is_known = True

    @torch.inference_mode()
    def give_back(self, step: Step) -> None:
        places = self._places(step)
        if places:
            tokens = self._rows.token_ids
            rows, index = upload([*places, *places.values()], tokens.device, torch.int64).view(2, -1)
            self._link.send(tokens[rows, index])

    def _places(self, step: Step) -> dict[int, int]:
        """Of rows that get one token of the step, as every stage knows before it is sampled: those without drafts."""
        lengths, drafts = self._rows.host_num_tokens, step.plan.draft_token_ids
        return {row: lengths[row] - 1 for row in step.sample_rows if row not in drafts}

    def _take(self, last: int) -> None:
        """Get the tokens of all steps up to one, in their order, into the rows."""
        while self._expected and self._expected[0].plan.step_id <= last:
            step, rows = self._expected.popleft(), self._rows
            # If a rank fails meanwhile, less than all bytes come: behind zeros they still are tokens.
            step.is_known = self._link.receive(self._tokens[: len(step.places)].zero_())
            # A row may be another request's by now.
            same = (row if rows.num_starts[row] == step.starts[row] else rows.scratch_row for row in step.places)
            self._append_to(list(same))

    @torch.inference_mode()
    def _append_to(self, rows: list[int]) -> None:
        """As the last stage's sampler does it there."""
        state, index = self._rows, upload(rows, self._tokens.device, torch.int64)
        given = self._tokens[: len(rows)], self._no_logits[: len(rows)], index
        self._append(*given, state.token_ids, state.num_tokens, state.num_computed, state.scratch_row)

    def empty_link(self) -> None:
        if self._expected:
            self._take(self._expected[-1].plan.step_id)

    def start_over(self) -> None:
        self._expected.clear()

    @torch.inference_mode()
    def learn(self, returned: Iterable[Returned]) -> None:
        if self.samples:
            return
        appended: list[tuple[int, int, int]] = []  # (row, place, token)
        lengths: dict[int, int] = {}
        for result in returned:
            self._take(result.step_id)
            # What was planned before it and has not come back is void: a step failed.
            for step_id in [each for each in self._waiting if each < result.step_id]:
                del self._waiting[step_id]
            step = self._waiting.pop(result.step_id, None)
            if step is not None:
                self._settle(step, result, appended, lengths)
        if lengths:
            self._write(appended, lengths)

    def _settle(
        self, step: _HandedOn, result: Returned, appended: list[tuple[int, int, int]], lengths: dict[int, int]
    ) -> None:
        """Heal and settle drafts; find tokens that the link has not brought: of drafts, or since a step failed."""
        rows, drafts = self._rows, step.plan.draft_token_ids
        noted = {each[0]: each for each in step.drafted}
        for index, (row, tokens) in enumerate(zip(step.plan.rows, result.token_ids, strict=True)):
            if rows.num_starts[row] != step.starts[row]:
                continue  # another request's by now
            if index in result.broken:
                self._heal(row, rows.host_num_computed[row])
            if row in noted:
                rows.settle(noted[row], 1 + len(drafts[row]) - len(tokens))
            if not tokens or (step.is_known and row in step.places):
                continue
            length = lengths[row] = step.places[row] + 1 if row in step.places else rows.host_num_tokens[row]
            first = length - len(tokens)
            appended += [(row, first + place, token) for place, token in enumerate(tokens)]

    def _write(self, appended: Sequence[tuple[int, int, int]], lengths: dict[int, int]) -> None:
        """Bring tokens and lengths to the device."""
        state, device = self._rows, self._rows.token_ids.device
        columns = [number for column in zip(*appended, strict=True) for number in column]
        rows, places, tokens = upload(columns, device, torch.int64).view(3, -1)
        state.token_ids[rows, places] = tokens.to(torch.int32)
        ended, known = upload([*lengths, *lengths.values()], device, torch.int64).view(2, -1)
        state.num_tokens[ended], state.num_computed[ended] = known, known - 1


class StageInputs(TokenInputs):
    """Of a stage behind the first: embeddings are what the stage before handed on."""

    def __init__(self, inner: TokenInputs, buffer: Tensor) -> None:
        """`inner` are the model's own; buffer [max_num_batched_tokens or more, hidden]."""
        self.captures = inner.captures
        self._inner, self.buffer = inner, buffer
        self._given: Tensor | None = None

    @staticmethod
    def num_rows(sizes: EngineSizes) -> int:
        """Of the buffer: steps are padded to sizes that are at most this much larger."""
        return sizes.max_num_batched_tokens + 512

    @classmethod
    def contributes(cls, sizes: EngineSizes, num_kept: int = 0, num_read: int = 1) -> Iterable[LedgerLine]:
        num_bytes = (cls.num_rows(sizes) + num_kept) * num_read * sizes.hidden_size * sizes.itemsize
        yield LedgerLine("stage", num_bytes, "hidden states of the stage before")

    def add_request(self, start: RowStart) -> None:
        self._inner.add_request(start)

    def remove_request(self, row: int) -> None:
        self._inner.remove_request(row)

    def begin_step(self, rows: Sequence[int], counts: Sequence[int], computed: Sequence[int]) -> bool:
        return self._inner.begin_step(rows, counts, computed)

    def rotary_positions(self, index: Tensor, rows: Tensor, query_starts: Tensor) -> Tensor:
        return self._inner.rotary_positions(index, rows, query_starts)

    def give(self, hidden: Tensor | None) -> None:
        self._given = hidden

    def embeds(self, input_ids: Tensor, index: Tensor, rows: Tensor, query_starts: Tensor) -> Tensor | None:
        return (self.buffer if self._given is None else self._given)[: input_ids.shape[0]]


class NoSampler(Sampler):
    """Of a stage that samples nothing: it keeps no parameters of requests."""

    def __init__(self) -> None:
        return None

    def add_request(self, row: int, start: RowStart) -> None:
        return None

    def remove_request(self, row: int) -> None:
        return None

    def apply_staged_writes(self) -> None:
        return None

    def kind(self, row_list: list[int], masked: bool) -> SamplingKind:
        return SamplingKind()

    @property
    def usual_kinds(self) -> list[SamplingKind]:
        return []


def nothing_sampled(plan: StepPlan, way: str) -> StepResult:
    """What a stage says of a step that it has handed on."""
    return StepResult(plan.step_id, [[] for _ in plan.rows], way=way)
