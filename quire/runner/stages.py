"""A stage of a pipeline, as its runner sees it: hidden states come from the stage before and go to the next one.

The last stage samples. What it sampled comes back with a later plan, before any of these rows is planned again, so
that every stage knows the tokens and lengths of its rows. Transfers are outside of what ways capture: a step reads
a buffer at a fixed place, and leaves its result in one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.models.token_inputs import TokenInputs
from quire.parallel.pipeline import Pipeline
from quire.platform.transfer import upload
from quire.runner.request_rows import RequestRows
from quire.runner.sampling.sampler import Sampler, SamplingKind
from quire.runner.step import Step
from quire.types.ledger import EngineSizes, LedgerLine
from quire.types.step import Returned, RowStart, StepPlan, StepResult


class _HandedOn(NamedTuple):
    """A step that went on to the next stage."""

    plan: StepPlan
    starts: list[int]  # RequestRows.num_starts of each of its rows
    drafted: list[tuple[int, int]]  # see RequestRows.note_drafts


class WholeModel:
    """The only stage: it moves nothing, and samples."""

    samples = True

    def receive(self, num_tokens: int) -> None:
        """Get the hidden states of a step's tokens from the stage before. May block."""
        return None

    def send(self, step: Step) -> None:
        """Give the step's hidden states to the next stage. May block."""
        return None

    def learn(self, returned: Iterable[Returned]) -> None:
        """What the last stage sampled in steps before."""
        return None


class Stage(WholeModel):
    def __init__(
        self, pipeline: Pipeline, rows: RequestRows, heal: Callable[[int, int], None], inputs: StageInputs | None
    ) -> None:
        """`heal` makes the blocks of a row finite again, see Containment; `inputs`: None of the first stage."""
        self.samples = pipeline.is_last
        self._link, self._rows, self._heal, self._inputs = pipeline.link, rows, heal, inputs
        self._waiting: dict[int, _HandedOn] = {}  # steps whose results have not come back, by id

    def receive(self, num_tokens: int) -> None:
        if self._inputs is not None:
            self._link.receive(self._inputs.buffer[:num_tokens])

    def send(self, step: Step) -> None:
        if self.samples:
            return
        assert step.every_hidden is not None
        self._link.send(step.every_hidden[: step.shape.num_tokens])
        starts = [self._rows.num_starts[row] for row in step.plan.rows]
        self._waiting[step.plan.step_id] = _HandedOn(step.plan, starts, step.drafted_rows)

    @torch.inference_mode()
    def learn(self, returned: Iterable[Returned]) -> None:
        if self.samples:
            return
        appended: list[tuple[int, int, int]] = []  # (row, place, token)
        lengths: dict[int, int] = {}
        for result in returned:
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
        rows, drafts = self._rows, step.plan.draft_token_ids
        noted = {each[0]: each for each in step.drafted}
        for index, (row, tokens) in enumerate(zip(step.plan.rows, result.token_ids, strict=True)):
            if rows.num_starts[row] != step.starts[index]:
                continue  # another request's by now
            if index in result.broken:
                self._heal(row, rows.host_num_computed[row])
            if row in noted:
                rows.settle(noted[row], 1 + len(drafts[row]) - len(tokens))
            if not tokens:
                continue
            length = lengths[row] = rows.host_num_tokens[row]
            first = length - len(tokens)
            appended += [(row, first + place, token) for place, token in enumerate(tokens)]

    def _write(self, appended: Sequence[tuple[int, int, int]], lengths: dict[int, int]) -> None:
        """Bring tokens and lengths to the device, as the last stage's sampler has done there."""
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
