"""A step from its forward pass to its result: launched by the host, or replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from quire.types.step import StepPlan, StepResult, TokenLogprobs
from quire.worker.containment import BrokenRows
from quire.worker.graphs import Arriving
from quire.worker.input_batch import InputBatch
from quire.worker.sampling.logprobs import unpack_logprobs
from quire.worker.sampling.sampler import SampleOutput, error_of


@dataclass
class LaunchedStep:
    plan: StepPlan
    batch: InputBatch
    hidden: Tensor
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    sampled: SampleOutput | None = None
    broken: BrokenRows | None = None  # None: not sampled yet

    def result(self) -> StepResult:
        """What was sampled. Waits for the step."""
        assert self.broken is not None, "the step still waits for masks"
        result = StepResult(self.plan.step_id, [[] for _ in self.plan.rows], prompt_logprobs=self.prompt_logprobs)
        if self.sampled is None:
            return result
        indices = self.batch.sample_indices
        for index, token in zip(indices, self.sampled.tokens(), strict=True):
            result.token_ids[index] = [token]
        for place, logprobs in self.sampled.logprobs().items():
            result.logprobs[indices[place]] = [logprobs]
        for place, message in self.sampled.errors().items():
            result.errors[indices[place]] = message
        return result


@dataclass
class ReplayedStep:
    plan: StepPlan
    sample_indices: Sequence[int]  # into the plan's rows
    wanted_logprobs: dict[int, int]  # places among those that sample, and how many likeliest tokens
    sample: Callable[[], Arriving]
    broken: BrokenRows = field(default_factory=BrokenRows)
    arriving: Arriving | None = None  # None: not sampled yet, or nobody samples

    def result(self) -> StepResult:
        """What was sampled. Waits for the step."""
        indices = self.sample_indices
        result = StepResult(self.plan.step_id, [[] for _ in self.plan.rows])
        if not indices:
            return result
        assert self.arriving is not None, "the step still waits for masks"
        found = self.arriving.get()[:, : len(indices)]
        tokens, codes = found[:2].tolist()
        for index, token, code in zip(indices, tokens, codes, strict=True):
            result.token_ids[index] = [token]
            if code:
                result.errors[index] = error_of(code)
        if self.wanted_logprobs and isinstance(found, Tensor):
            entries = unpack_logprobs(tokens, found[2:], self.wanted_logprobs)
            result.logprobs = {indices[place]: [entry] for place, entry in entries.items()}
        return result
