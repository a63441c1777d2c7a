"""The runner: applies a plan to the rows, runs the model, samples. Orchestration only."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.models.base import CausalLM
from quire.types.step import StepPlan, StepResult
from quire.worker.block_tables import BlockTables
from quire.worker.containment import MESSAGE, Containment
from quire.worker.input_batch import InputBatch, InputBuilder
from quire.worker.logits import LogitsHead
from quire.worker.prompt_logprobs import PromptLogprobs
from quire.worker.request_rows import RequestRows
from quire.worker.sampling.base import SampleRows
from quire.worker.sampling.sampler import SampleOutput, Sampler


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
    ) -> None:
        self.model = model
        self.rows = rows
        self.tables = tables
        self.inputs = inputs
        self.head = head
        self.sampler = sampler
        self.prompt_logprobs = prompt_logprobs
        self.containment = Containment(model.attention_layers(), tables)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        self._apply(plan)
        batch = self.inputs.build(plan)
        hidden = self.model(batch.input_ids, batch.positions, batch.forward)
        prompt_logprobs = self.prompt_logprobs.compute(plan, batch, hidden)
        self.rows.advance(batch.rows, batch.counts, plan.rows, plan.num_tokens)
        result = StepResult(plan.step_id, [[] for _ in plan.rows], prompt_logprobs=prompt_logprobs)
        if batch.sample_indices:
            self._write(result, batch.sample_indices, self._sample(plan, batch, hidden))
        for index in self.containment.broken_rows(plan, batch, hidden):
            result.errors[index] = MESSAGE
        for index in result.errors:
            self.containment.heal(plan.rows[index], self.rows.host_num_computed[plan.rows[index]])
        return result

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.freed_rows:
            self.rows.free(row)
            self.sampler.remove_request(row)
            self.prompt_logprobs.remove_request(row)
        for start in plan.starts:
            self.rows.start(start)
            self.sampler.add_request(start.row, start)
            self.prompt_logprobs.add_request(start.row, start)
        self.sampler.apply_staged_writes()
        self.tables.apply(plan)

    def _sample(self, plan: StepPlan, batch: InputBatch, hidden: Tensor) -> SampleOutput:
        last = [batch.starts[i] + plan.num_tokens[i] - 1 for i in batch.sample_indices]
        row_list = [plan.rows[i] for i in batch.sample_indices]
        longest = max(self.rows.host_num_tokens[row] for row in row_list)
        rows = SampleRows(torch.tensor(row_list, device=hidden.device), row_list, longest)
        logits = self.head(hidden, torch.tensor(last, device=hidden.device))
        output = self.sampler.sample(logits, rows, self.rows)
        self.rows.append(rows.rows, output.token_ids, row_list)
        return output

    def _write(self, result: StepResult, indices: list[int], output: SampleOutput) -> None:
        for index, token in zip(indices, output.tokens(), strict=True):
            result.token_ids[index] = [token]
        for position, logprobs in output.logprobs().items():
            result.logprobs[indices[position]] = [logprobs]
        for position, message in output.errors().items():
            result.errors[indices[position]] = message
