"""Step: one pass over a batch from its plan to its result, whichever way it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from torch import Tensor

from quire.platform.transfer import Download
from quire.runner.request_rows import RequestRows
from quire.runner.sampling.logprobs import unpack_logprobs
from quire.runner.sampling.sampler import SamplingKind
from quire.types.status import MESSAGES
from quire.types.step import StepPlan, StepResult, TokenLogprobs


@dataclass(frozen=True, slots=True)
class PlannedTokens:
    """Where the tokens of a step stand, as the host knows it."""

    total: int
    starts: list[int]  # [num_rows] index of each row's first token
    contexts: list[int]  # [num_rows] how many tokens of each row are computed after the step
    sample_indices: Sequence[int]  # [m] index into the plan's rows of those that sample in this step
    sample_rows: list[int]  # [m] the rows themselves
    sample_tokens: list[int]  # [m] index of each one's last token

    @property
    def sample_contexts(self) -> list[int]:
        """[m] how many tokens each sampled token sees."""
        return [self.contexts[index] for index in self.sample_indices]

    def sampling_at(self, plan: StepPlan, indices: Sequence[int]) -> PlannedTokens:
        """The same tokens, with samples at the last token of these of the plan's rows."""
        return replace(
            self,
            sample_indices=indices,
            sample_rows=[plan.rows[index] for index in indices],
            sample_tokens=[self.starts[index] + plan.num_tokens[index] - 1 for index in indices],
        )


def planned_tokens(plan: StepPlan, state: RequestRows) -> PlannedTokens:
    """A row samples when its computed tokens catch up with those that are known."""
    computed, known = state.host_num_computed, state.host_num_tokens
    contexts = [computed[row] + count for row, count in zip(plan.rows, plan.num_tokens, strict=True)]
    starts, total = [], 0
    for count in plan.num_tokens:
        starts.append(total)
        total += count
    samples = [index for index, (row, end) in enumerate(zip(plan.rows, contexts, strict=True)) if end == known[row]]
    return PlannedTokens(
        total=total,
        starts=starts,
        contexts=contexts,
        sample_indices=samples,
        sample_rows=[plan.rows[index] for index in samples],
        sample_tokens=[starts[index] + plan.num_tokens[index] - 1 for index in samples],
    )


class StepShape(NamedTuple):
    """What a way to run is chosen by."""

    num_tokens: int
    num_rows: int
    num_samples: int
    is_decode: bool  # every row computes its one last known token, and samples
    every_token: bool  # hidden states of all tokens are wanted, not only of those that are sampled from
    sampling: SamplingKind


class Arriving(Protocol):
    """A tensor on its way to the host; `get` waits for it."""

    def get(self) -> Tensor: ...


class Arrived:
    """A tensor that is on the host already, until the next step overwrites it."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get(self) -> Tensor:
        return self._tensor


@dataclass
class Sampled:
    """What a step sampled, still on its way."""

    tokens: Arriving  # [m or more, 2 or more] int32: tokens, and OK or what was wrong
    logprobs: Arriving | None = None  # packed, see pack_logprobs
    offset: int = 0  # column where they begin
    lines: Sequence[int] = ()  # line of each entry of `places`
    counts: Sequence[int] = ()  # number of top logprobs of each
    places: Sequence[int] = ()  # among the rows that sample
    errors: dict[int, str] = field(default_factory=dict)  # place -> why a feature of the host failed for the row


@dataclass
class Step:
    plan: StepPlan
    shape: StepShape
    state: RequestRows
    hidden: Tensor | None = None  # where a way leaves what it samples from
    finite: Download | None = None  # [num_tokens] bool: whether each token's values are finite; None: all that matter
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    sampled: Sampled | None = None  # None: not sampled yet, or no row samples

    planned: PlannedTokens | None = None  # made when it is first asked for, before the step counts as computed

    @property
    def tokens(self) -> PlannedTokens:
        if self.planned is None:
            self.planned = planned_tokens(self.plan, self.state)
        return self.planned

    @property
    def sample_indices(self) -> Sequence[int]:
        return range(len(self.plan.rows)) if self.shape.is_decode else self.tokens.sample_indices

    @property
    def sample_rows(self) -> list[int]:
        return self.plan.rows if self.shape.is_decode else self.tokens.sample_rows

    def result(self) -> StepResult:
        """What was sampled. Waits for the step."""
        indices = self.sample_indices
        result = StepResult(self.plan.step_id, [[] for _ in self.plan.rows], prompt_logprobs=self.prompt_logprobs)
        if not indices:
            return result
        assert self.sampled is not None, "the step still waits for masks"
        sampled = self.sampled
        # As an array: after a step the processor's caches are cold, and ops of torch take long.
        found = sampled.tokens.get().numpy()[: len(indices)]
        tokens, codes = found[:, 0].tolist(), found[:, 1].tolist()
        for index, token, code in zip(indices, tokens, codes, strict=True):
            result.token_ids[index] = [token]
            if code:
                result.errors[index] = MESSAGES[code]
        for place, message in sampled.errors.items():
            result.errors[indices[place]] = message
        if sampled.logprobs is not None:
            packed = sampled.logprobs.get()[list(sampled.lines), sampled.offset :]
            entries = unpack_logprobs(packed, [tokens[place] for place in sampled.places], list(sampled.counts))
            result.logprobs = {indices[place]: [entry] for place, entry in zip(sampled.places, entries, strict=True)}
        return result

    def broken_rows(self) -> list[int]:
        """Indices into the plan's rows of those with a token that is not finite. Waits for the step."""
        if self.finite is None:
            return []
        finite = self.finite.get()
        if bool(finite.all()):
            return []
        parts = finite[: self.shape.num_tokens].split(self.plan.num_tokens)
        return [index for index, part in enumerate(parts) if not bool(part.all())]
