"""The runner: applies a plan to the rows, picks a way to run the step, and builds its result. Orchestration only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quire.models.token_inputs import PLAIN_INPUTS, TokenInputs
from quire.runner.adapters import NoAdapters
from quire.runner.containment import MESSAGE, Containment
from quire.runner.experts import ExpertLoads, RoutedExpertsRecorder
from quire.runner.pooling import NoPooling
from quire.runner.prompt_logprobs import PromptLogprobs
from quire.runner.proposers.base import NoProposer
from quire.runner.request_rows import BlockTables, RequestRows
from quire.runner.sampling.sampler import Sampler
from quire.runner.stages import WholeModel, nothing_sampled
from quire.runner.step import Arriving, Step, StepShape, planned_tokens
from quire.runner.ways import Way
from quire.types.masks import Masks
from quire.types.step import StepPlan, StepResult


class RunningStep:
    """A step that has been started. The device may still be computing it."""

    def __init__(self, runner: Runner, step: Step, way: Way) -> None:
        self._runner, self._step, self._way = runner, step, way
        self._result: StepResult | None = None
        self._error: Exception | None = None

    def sample(self, masks: Masks) -> None:
        """Let a step with mask_slots sample under these masks, a line per sample position. Does not wait."""
        if self._runner.stage.samples:
            self._runner.sampler.masks.load(self._step.plan.mask_slots, masks)
            self._way.sample(self._step)
            self._runner.stage.give_back(self._step)
            self._runner.proposer.begin(self._step.plan, self._step.every_hidden)

    def result(self) -> StepResult:
        """Wait for the step; tell which of its rows broke, and make their blocks fit for others."""
        if self._error is not None:
            raise self._error
        if self._result is None:
            self._result = self._runner.finish(self._step)
        return self._result

    @property
    def hidden(self) -> Tensor | None:
        """[m or more, hidden]: what it samples from."""
        return self._step.hidden

    def settle(self) -> None:
        """Wait for the step; if it failed, `result` says so."""
        try:
            self.result()
        except Exception as error:  # whatever it was, it is for who asks for the result
            self._error = error


class Runner:
    def __init__(
        self,
        rows: RequestRows,
        tables: BlockTables,
        sampler: Sampler,
        prompt_logprobs: PromptLogprobs,
        routed_experts: RoutedExpertsRecorder,
        containment: Containment,
        ways: Sequence[Way],
        inputs: TokenInputs = PLAIN_INPUTS,
        pooler: NoPooling | None = None,
        adapters: NoAdapters | None = None,
        stage: WholeModel | None = None,
        expert_loads: ExpertLoads | None = None,
    ) -> None:
        """The last of `ways` takes every step."""
        self.stage = stage or WholeModel()
        self._expert_loads = expert_loads or ExpertLoads(nn.Module())
        self.inputs = inputs
        self.adapters = adapters or NoAdapters()
        self.pooler = pooler or NoPooling()
        self.rows, self.tables, self.sampler = rows, tables, sampler
        self.prompt_logprobs, self.containment, self.ways = prompt_logprobs, containment, ways
        self.routed_experts = routed_experts
        self._parts = (prompt_logprobs, routed_experts, self.inputs, self.pooler, self.adapters)  # that follow rows
        self.sampling_kind = sampler.kind
        self.proposer = NoProposer()
        self._newest: RunningStep | None = None  # of a proposer that follows every step

    def execute(self, plan: StepPlan) -> RunningStep:
        """Start a step. One with mask_slots stops before sampling: its `sample` comes next, with the masks."""
        if self._newest is not None:  # on every rank proposals are made between the same two steps
            self._newest.settle()
        self.proposer.before(plan)
        if plan.starts or plan.freed_rows or plan.block_ids:
            self._apply(plan)
        step = self._describe(plan)
        routed = self.routed_experts.wants(plan.rows)
        if routed:
            self.routed_experts.begin()
        self.stage.receive(step)
        way = next(way for way in self.ways if way.forward(step))
        if routed:
            step.routed = self.routed_experts.end(plan, self.rows.host_num_computed)
        step.way = way.name
        self.rows.note_computed(plan.rows, plan.num_tokens)
        if plan.draft_token_ids:
            step.drafted_rows = self.rows.note_drafts(plan.draft_token_ids)
        self.rows.note_appended(step.sample_rows)
        self.stage.send(step)
        if not self.pooler.read(step) and step.shape.num_samples and not plan.mask_slots and self.stage.samples:
            way.sample(step)
            self.stage.give_back(step)
            self.proposer.begin(plan, step.every_hidden)
        running = RunningStep(self, step, way)
        if self.proposer.follows:
            self._newest = running
        return running

    def go_on(self, rows: list[int], hidden: Tensor | None, count: int) -> tuple[Arriving, Tensor]:
        """`count` decode steps of rows that have nothing else to compute, as one piece of work, see Way.go_on."""
        kind = self.sampling_kind(rows, False)
        found = next(found for way in self.ways if (found := way.go_on(rows, hidden, kind, count)) is not None)
        for _ in range(count):
            self.rows.note_computed(rows, [1] * len(rows))
            self.rows.note_appended(rows)
        return found

    @property
    def step_sizes(self) -> tuple[int, ...]:
        """Numbers of tokens that mixed steps are padded to, up to the largest of them."""
        return max((way.step_sizes for way in self.ways), key=len)

    def capture_next(self) -> bool:
        """Capture one more kind of step that may come; False if there is none."""
        return any(way.capture_next() for way in self.ways) or self.proposer.capture_next()

    def finish(self, step: Step) -> StepResult:
        self._newest = None
        if not self.stage.samples:
            return nothing_sampled(step.plan, step.way)
        result, plan = step.result(), step.plan
        if plan.draft_token_ids:
            self._settle(step, result)
        for index in step.broken_rows():
            result.errors[index] = MESSAGE
        for index in result.errors:
            self.containment.heal(plan.rows[index], self.rows.host_num_computed[plan.rows[index]])
        result.expert_load.update(self._expert_loads.read())
        if self.proposer.follows:
            result.proposals.update(self.proposer.propose(plan, result, step.every_hidden))
        return result

    def _describe(self, plan: StepPlan) -> Step:
        computed, known = self.rows.host_num_computed, self.rows.host_num_tokens
        num_tokens, num_rows = sum(plan.num_tokens), len(plan.rows)
        # A single token may also be the end or the whole of a chunk, after which more of the prompt follows.
        is_decode = num_tokens == num_rows and all(computed[row] + 1 == known[row] for row in plan.rows)
        tokens = None if is_decode else planned_tokens(plan, self.rows)
        rows = plan.rows if tokens is None else tokens.samples.rows
        drafts, unsettled = bool(plan.draft_token_ids), self.rows.unsettled
        adapted = self.adapters.are_in(plan.rows)
        sampling = self.sampling_kind(rows, bool(plan.mask_slots))._replace(drafted=drafts, adapted=adapted)
        needs_eager = (
            self.inputs.begin_step(plan.rows, plan.num_tokens, computed)
            or self.prompt_logprobs.wants(plan.rows)
            or self.routed_experts.wants(plan.rows)
        )
        shape = StepShape(
            num_tokens=num_tokens,
            num_rows=num_rows,
            num_samples=len(rows),
            is_decode=is_decode,
            every_token=needs_eager
            or not self.stage.samples
            or self.proposer.wants_hidden
            or self.pooler.wants_every_token(plan.rows),
            sampling=sampling,
            adapted=adapted,
            eager=needs_eager,
            places_drafts=drafts or (bool(unsettled) and not unsettled.keys().isdisjoint(plan.rows)),
        )
        return Step(plan, shape, self.rows, planned=tokens)

    def _settle(self, step: Step, result: StepResult) -> None:
        given = dict(zip(step.plan.rows, result.token_ids, strict=True))
        for noted in step.drafted_rows:
            row = noted[0]
            self.rows.settle(noted, 1 + len(step.plan.draft_token_ids[row]) - len(given[row]))

    @torch.inference_mode()
    def _apply(self, plan: StepPlan) -> None:
        for row in plan.freed_rows:
            self.rows.free(row)
            self.sampler.remove_request(row)
            for part in self._parts:
                part.remove_request(row)
        for load in plan.adapter_loads:
            self.adapters.load(load)
        for start in plan.starts:
            self.rows.start(start)
            self.proposer.start(start)
            self.sampler.add_request(start.row, start)
            for part in self._parts:
                part.add_request(start)
        self.rows.apply_staged_writes()
        self.sampler.apply_staged_writes()
        self.tables.apply(plan)
