"""The runner: applies a plan to the rows, runs the model, samples. Orchestration only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.models.base import CausalLM
from quire.platform.transfer import Download
from quire.types.masks import Masks
from quire.types.step import StepPlan, StepResult, TokenLogprobs
from quire.worker.block_tables import BlockTables
from quire.worker.containment import MESSAGE, BrokenRows, Containment
from quire.worker.graphs import Arriving, ForwardGraphs, PieceGraphs, PromptGraphs, StepGraphs
from quire.worker.input_batch import InputBatch, InputBuilder, PlannedTokens, planned_tokens
from quire.worker.logits import LogitsHead
from quire.worker.prompt_logprobs import PromptLogprobs
from quire.worker.request_rows import RequestRows
from quire.worker.sampling.base import SampleRows
from quire.worker.sampling.logprobs import unpack_logprobs
from quire.worker.sampling.sampler import SampleOutput, Sampler, error_of

Finish = Callable[[], StepResult]


@dataclass
class RunningStep:
    """A step from its forward pass to its result."""

    plan: StepPlan
    batch: InputBatch
    hidden: Tensor
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    sampled: SampleOutput | None = None
    broken: BrokenRows | None = None  # None: not sampled yet


@dataclass
class ReplayedStep:
    """A recorded step from its forward pass to its result."""

    plan: StepPlan
    sample_indices: Sequence[int]  # into the plan's rows
    wanted_logprobs: dict[int, int]  # places among those that sample, and how many likeliest tokens
    sample: Callable[[], Arriving]
    broken: BrokenRows = field(default_factory=BrokenRows)
    arriving: Arriving | None = None  # None: not sampled yet, or nobody samples


class Runner:
    def __init__(
        self,
        model: CausalLM,
        rows: RequestRows,
        tables: BlockTables,
        inputs: InputBuilder,
        head: LogitsHead,
        sampler: Sampler,
        prompt_logprobs: PromptLogprobs,
        graphs: StepGraphs,
        masked_graphs: PieceGraphs,
        prompt_graphs: PromptGraphs,
        forward_graphs: ForwardGraphs,
    ) -> None:
        self.model = model
        self.rows = rows
        self.tables = tables
        self.inputs = inputs
        self.head = head
        self.sampler = sampler
        self.prompt_logprobs = prompt_logprobs
        self.graphs, self.masked_graphs = graphs, masked_graphs
        self.prompt_graphs, self.forward_graphs = prompt_graphs, forward_graphs
        self.containment = Containment(model.attention_layers(), tables)
        self._unsampled: RunningStep | ReplayedStep | None = None

    def execute(self, plan: StepPlan) -> Finish:
        """Start a step; what is returned waits for it and builds its result.

        A step with mask_slots stops before sampling: `sample` comes next, with the masks.
        """
        if plan.starts or plan.freed_rows or plan.block_ids:
            self._apply(plan)
        masked = bool(plan.mask_slots)
        graphs = self.masked_graphs if masked else self.graphs
        if graphs.takes(plan) and self.sampler.recorded_kind(plan.rows, masked) is not None:
            return self._replay(plan)
        planned = planned_tokens(plan, self.rows)
        wants_all = self.prompt_logprobs.wants(plan.rows)
        finite = None if wants_all else self.prompt_graphs.forward(plan, planned)
        if finite is None:
            return self._launch(plan, planned, wants_all)
        return self._follow(plan, planned, finite)

    @torch.inference_mode()
    def _launch(self, plan: StepPlan, planned: PlannedTokens, wants_all: bool) -> Finish:
        batch = self.inputs.build(plan, planned, every_token=wants_all)
        hidden = self.forward_graphs.run(batch)
        if hidden is None:
            hidden = self.model(batch.input_ids, batch.positions, batch.forward)
        prompt_logprobs = self.prompt_logprobs.compute(plan, batch, hidden)
        self.rows.advance(batch.rows, batch.counts, plan.rows, plan.num_tokens)
        step = RunningStep(plan, batch, hidden, prompt_logprobs)
        if plan.mask_slots:
            self._unsampled = step
        else:
            self._complete(step)
        return lambda: self._finish(step)

    @torch.inference_mode()
    def sample(self, masks: Masks) -> None:
        """Let the newest step sample under these masks, a line per entry of its mask_slots."""
        step, self._unsampled = self._unsampled, None
        assert step is not None, "no step waits for masks"
        self.sampler.masks.load(step.plan.mask_slots, masks)
        try:
            if isinstance(step, ReplayedStep):
                step.arriving = step.sample()
            else:
                self._complete(step)
        finally:
            self.sampler.masks.clear()

    def _complete(self, step: RunningStep) -> None:
        """What follows the forward pass. Does not wait for the device."""
        if step.batch.sample_indices:
            step.sampled = self._sample(step.batch, step.hidden)
        step.broken = self.containment.find(step.plan, step.batch, step.hidden)

    def _finish(self, step: RunningStep) -> StepResult:
        plan = step.plan
        assert step.broken is not None, "the step still waits for masks"
        result = StepResult(plan.step_id, [[] for _ in plan.rows], prompt_logprobs=step.prompt_logprobs)
        if step.sampled is not None:
            self._write(result, step.batch.sample_indices, step.sampled)
        self._contain(result, plan, step.broken)
        return result

    def _replay(self, plan: StepPlan) -> Finish:
        """A decode step as a graph."""
        wanted = self.sampler.wanted_logprobs(plan.rows)
        step = ReplayedStep(plan, range(len(plan.rows)), wanted, self.masked_graphs.sample)
        if plan.mask_slots:
            self.masked_graphs.forward(plan)
            self._unsampled = step
        else:
            step.arriving = self.graphs.run(plan)
        self.rows.note_computed(plan.rows, plan.num_tokens)
        self.rows.note_appended(plan.rows)
        return lambda: self._finish_replayed(step)

    def _follow(self, plan: StepPlan, planned: PlannedTokens, finite: Download) -> Finish:
        """What comes after the recorded forward pass of a step with prompts."""
        wanted = self.sampler.wanted_logprobs(planned.sample_rows)
        broken = BrokenRows(finite, plan.num_tokens)
        step = ReplayedStep(plan, planned.sample_indices, wanted, self.prompt_graphs.sample, broken)
        if plan.mask_slots:
            self._unsampled = step
        elif planned.sample_indices:
            step.arriving = step.sample()
        self.rows.note_computed(plan.rows, plan.num_tokens)
        self.rows.note_appended(planned.sample_rows)
        return lambda: self._finish_replayed(step)

    def _finish_replayed(self, step: ReplayedStep) -> StepResult:
        plan, indices = step.plan, step.sample_indices
        result = StepResult(plan.step_id, [[] for _ in plan.rows])
        if indices:
            assert step.arriving is not None, "the step still waits for masks"
            found = step.arriving.get()[:, : len(indices)]
            tokens, codes = found[:2].tolist()
            for index, token, code in zip(indices, tokens, codes, strict=True):
                result.token_ids[index] = [token]
                if code:
                    result.errors[index] = error_of(code)
            if step.wanted_logprobs and isinstance(found, Tensor):
                entries = unpack_logprobs(tokens, found[2:], step.wanted_logprobs)
                result.logprobs = {indices[place]: [entry] for place, entry in entries.items()}
        self._contain(result, plan, step.broken)
        return result

    def _contain(self, result: StepResult, plan: StepPlan, broken: BrokenRows) -> None:
        """Say which rows broke, and make their blocks fit for others."""
        for index in broken.indices():
            result.errors[index] = MESSAGE
        for index in result.errors:
            self.containment.heal(plan.rows[index], self.rows.host_num_computed[plan.rows[index]])

    @torch.inference_mode()
    def _apply(self, plan: StepPlan) -> None:
        for row in plan.freed_rows:
            self.rows.free(row)
            self.sampler.remove_request(row)
            self.prompt_logprobs.remove_request(row)
        for start in plan.starts:
            self.rows.start(start)
            self.sampler.add_request(start.row, start)
            self.prompt_logprobs.add_request(start.row, start)
        self.rows.apply_staged_writes()
        self.sampler.apply_staged_writes()
        self.tables.apply(plan)

    def _sample(self, batch: InputBatch, hidden: Tensor) -> SampleOutput:
        longest = max(self.rows.host_num_tokens[row] for row in batch.sample_rows)
        rows = SampleRows(batch.sample_rows_tensor, batch.sample_rows, longest)
        output = self.sampler.sample(self.head(hidden, batch.hidden_indices), rows, self.rows)
        self.rows.append(rows.rows, output.token_ids, batch.sample_rows)
        output.send()
        return output

    def _write(self, result: StepResult, indices: list[int], output: SampleOutput) -> None:
        for index, token in zip(indices, output.tokens(), strict=True):
            result.token_ids[index] = [token]
        for position, logprobs in output.logprobs().items():
            result.logprobs[indices[position]] = [logprobs]
        for position, message in output.errors().items():
            result.errors[indices[position]] = message
