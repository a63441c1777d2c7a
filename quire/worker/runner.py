"""The runner: applies a plan to the rows, runs the model, samples. Orchestration only."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.models.base import CausalLM
from quire.platform.transfer import Download
from quire.types.masks import Masks
from quire.types.step import StepPlan, StepResult
from quire.worker.block_tables import BlockTables
from quire.worker.containment import MESSAGE, BrokenRows, Containment
from quire.worker.graphs import ForwardGraphs, PieceGraphs, PromptGraphs, StepGraphs
from quire.worker.input_batch import InputBatch, InputBuilder, PlannedTokens, planned_tokens
from quire.worker.logits import LogitsHead
from quire.worker.prompt_logprobs import PromptLogprobs
from quire.worker.request_rows import RequestRows
from quire.worker.sampling.base import SampleRows
from quire.worker.sampling.sampler import SampleOutput, Sampler
from quire.worker.steps import LaunchedStep, ReplayedStep

Finish = Callable[[], StepResult]


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
        self._unsampled: LaunchedStep | ReplayedStep | None = None

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

    def prepare(self) -> bool:
        """Record one more step that may come, where steps are recorded; False if there is none."""
        return self.graphs.record_next() or self.prompt_graphs.record_next()

    @torch.inference_mode()
    def _launch(self, plan: StepPlan, planned: PlannedTokens, wants_all: bool) -> Finish:
        batch = self.inputs.build(plan, planned, every_token=wants_all)
        hidden = self.forward_graphs.run(batch)
        if hidden is None:
            hidden = self.model(batch.input_ids, batch.positions, batch.forward)
        prompt_logprobs = self.prompt_logprobs.compute(plan, batch, hidden)
        self.rows.advance(batch.rows, batch.counts, plan.rows, plan.num_tokens)
        step = LaunchedStep(plan, batch, hidden, prompt_logprobs)
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

    def _complete(self, step: LaunchedStep) -> None:
        """What follows the forward pass. Does not wait for the device."""
        if step.batch.sample_indices:
            step.sampled = self._sample(step.batch, step.hidden)
        step.broken = self.containment.find(step.plan, step.batch, step.hidden)

    def _finish(self, step: LaunchedStep | ReplayedStep) -> StepResult:
        """Wait for a step; say which of its rows broke, and make their blocks fit for others."""
        result, plan = step.result(), step.plan
        assert step.broken is not None
        for index in step.broken.indices():
            result.errors[index] = MESSAGE
        for index in result.errors:
            self.containment.heal(plan.rows[index], self.rows.host_num_computed[plan.rows[index]])
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
        return lambda: self._finish(step)

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
        return lambda: self._finish(step)

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
