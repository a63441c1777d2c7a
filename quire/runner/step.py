"""Step: one pass over a batch from its plan to its result, whichever way it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from quire.platform.transfer import Download
from quire.runner.containment import MESSAGE
from quire.runner.experts import RoutedRows
from quire.runner.request_rows import RequestRows
from quire.runner.sampling.logprobs import add_asked, unpack_logprobs
from quire.runner.sampling.sampler import SamplingKind
from quire.types.status import MESSAGES
from quire.types.step import Pooled, StepPlan, StepResult, TokenLogprobs


@dataclass(frozen=True, slots=True)
class SamplePositions:
    """Where a step samples tokens, as parallel lists [m]: none, one or several times per row, one after the other."""

    indices: list[int]  # of the rows among the plan's
    rows: list[int]
    tokens: list[int]  # indices among the step's tokens of those whose hidden states are sampled from
    lengths: list[int]  # how many tokens of the row come before the one that is sampled, at most
    # Of steps with drafts only: how many of the row's drafts come before it, and the last of these, or -1.
    ahead: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class PlannedTokens:
    """Where the tokens of a step stand, as the host knows it."""

    total: int
    starts: list[int]  # [num_rows] index of each row's first token
    contexts: list[int]  # [num_rows] how many tokens of each row are computed after the step, at most
    samples: SamplePositions
    attended: list[int] | None = None  # [num_rows] as in HostLengths

    def padded_samples(self, plan: StepPlan, count: int) -> PlannedTokens:
        """The same tokens with `count` samples: more of the last one, or of the step's last token if none samples."""
        last = len(plan.rows) - 1
        at_the_end = SamplePositions([last], [plan.rows[last]], [self.total - 1], [self.contexts[last]], [0], [-1])
        given = self.samples if len(self.samples) else at_the_end
        columns = (given.indices, given.rows, given.tokens, given.lengths, given.ahead, given.drafts)
        missing = count - len(given)
        return replace(self, samples=SamplePositions(*(column + column[-1:] * missing for column in columns)))


def planned_tokens(plan: StepPlan, state: RequestRows) -> PlannedTokens:
    """A row samples when it catches up with its known tokens: at the last one, and at each draft behind it."""
    rows, drafts = plan.rows, plan.draft_token_ids
    computed, known, limits = state.host_num_computed, state.host_num_tokens, state.attended
    contexts = [computed[row] + count for row, count in zip(rows, plan.num_tokens, strict=True)]
    starts, total = [], 0
    for count in plan.num_tokens:
        starts.append(total)
        total += count
    if drafts:
        known = [count + len(drafts.get(row, ())) for row, count in enumerate(known)]
    indices = [index for index, (row, end) in enumerate(zip(rows, contexts, strict=True)) if end == known[row]]
    samples = SamplePositions(
        indices=indices,
        rows=[rows[index] for index in indices],
        tokens=[starts[index] + plan.num_tokens[index] - 1 for index in indices],
        lengths=[contexts[index] for index in indices],
    )
    attended = [min(limits.get(row, end), end) for row, end in zip(rows, contexts, strict=True)] if limits else None
    return PlannedTokens(total, starts, contexts, _with_drafts(samples, drafts) if drafts else samples, attended)


def _with_drafts(last: SamplePositions, drafts: dict[int, list[int]]) -> SamplePositions:
    """Of rows that sample at their last tokens: these positions, and those of the drafts before them."""
    found = [
        (index, row, token - len(mine) + ahead, length - len(mine) + ahead, ahead, draft)
        for index, row, token, length in zip(last.indices, last.rows, last.tokens, last.lengths, strict=True)
        for mine in (drafts.get(row, ()),)
        for ahead, draft in enumerate((-1, *mine))
    ]
    return SamplePositions(*(list(column) for column in zip(*found, strict=True)))


class StepShape(NamedTuple):
    """What a way to run is chosen by."""

    num_tokens: int
    num_rows: int
    num_samples: int
    is_decode: bool  # every row computes its one last known token, and samples
    every_token: bool  # hidden states of all tokens are wanted
    sampling: SamplingKind
    adapted: bool = False  # some row has a LoRA adapter
    eager: bool = False  # no other way does it: embeddings are given, or more than hidden states is wanted
    places_drafts: bool = False  # rows have drafts, or drafts in flight: only the device knows how long they are


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
    asked: Arriving | None = None  # [n, 2] int32: ranks and log-probabilities of tokens that rows ask for by id
    asked_ids: dict[int, tuple[int, ...]] = field(default_factory=dict)  # place -> these tokens
    errors: dict[int, str] = field(default_factory=dict)  # place -> why a feature of the host failed for the row


@dataclass
class PooledRows:
    """Vectors of rows whose prompts are computed, still on their way."""

    indices: list[int]  # into the plan's rows
    values: Arriving  # [m, size] float32: one of each row, or of the only row one of each token
    is_matrix: bool = False

    def tell(self, result: StepResult) -> None:
        """Wait for them; a vector that is not finite is an error."""
        values = self.values.get().numpy()
        for index, part in zip(self.indices, values[None] if self.is_matrix else values, strict=True):
            if np.isfinite(part).all():
                result.pooled[index] = Pooled(part.tobytes(), part.shape)
            else:
                result.errors[index] = MESSAGE


@dataclass
class Step:
    plan: StepPlan
    shape: StepShape
    state: RequestRows
    hidden: Tensor | None = None  # where a way leaves what it samples from
    every_hidden: Tensor | None = None  # [num_tokens or more, kept width]: what a way leaves of all tokens
    finite: Download | None = None  # [num_tokens] bool: whether each token's values are finite; None: all that matter
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    routed: RoutedRows | None = None  # of rows that ask for their experts
    sampled: Sampled | None = None  # None: not sampled yet, or no row samples
    pooled: list[PooledRows] = field(default_factory=list)  # of rows that pool, which give no token

    way: str = ""  # the name of the way that runs it
    captured: bool = False  # whether a part of it was captured first, as no step like it had come
    drafted_rows: list[tuple[int, int]] = field(default_factory=list)  # see RequestRows.note_drafts
    planned: PlannedTokens | None = None  # made when it is first asked for, before the step counts as computed

    @property
    def tokens(self) -> PlannedTokens:
        if self.planned is None:
            self.planned = planned_tokens(self.plan, self.state)
        return self.planned

    @property
    def sample_indices(self) -> Sequence[int]:
        """[m] index into the plan's rows of each sample position."""
        return range(len(self.plan.rows)) if self.shape.is_decode else self.tokens.samples.indices

    @property
    def sample_rows(self) -> list[int]:
        return self.plan.rows if self.shape.is_decode else self.tokens.samples.rows

    def result(self) -> StepResult:
        """What was sampled, as far as it holds. Waits for the step."""
        indices = self.sample_indices
        result = StepResult(
            self.plan.step_id,
            [[] for _ in self.plan.rows],
            prompt_logprobs=self.prompt_logprobs,
            routed_experts={} if self.routed is None else self.routed.get(),
            way=self.way,
            captured=self.captured,
        )
        for part in self.pooled:
            part.tell(result)
        if not indices or (self.pooled and self.sampled is None):
            return result
        assert self.sampled is not None, "the step still waits for masks"
        sampled = self.sampled
        # As an array: after a step the processor's caches are cold, and ops of torch take long.
        found = sampled.tokens.get().numpy()[: len(indices)]
        tokens, codes = found[:, 0].tolist(), found[:, 1].tolist()
        rejected = self._rejected(indices, tokens) if self.plan.draft_token_ids else frozenset()
        for place, (index, token, code) in enumerate(zip(indices, tokens, codes, strict=True)):
            if place in rejected or index in result.pooled:
                continue
            result.token_ids[index].append(token)
            if code:
                result.errors[index] = MESSAGES[code]
        for place, message in sampled.errors.items():
            if place not in rejected:
                result.errors[indices[place]] = message
        if sampled.logprobs is not None:
            packed = sampled.logprobs.get()[list(sampled.lines), sampled.offset :]
            entries = unpack_logprobs(packed, [tokens[place] for place in sampled.places], list(sampled.counts))
            if sampled.asked is not None:
                entries = add_asked(entries, sampled.places, sampled.asked_ids, sampled.asked.get())
            for place, entry in zip(sampled.places, entries, strict=True):
                if place not in rejected:
                    result.logprobs.setdefault(indices[place], []).append(entry)
        return result

    def _rejected(self, indices: Sequence[int], tokens: list[int]) -> frozenset[int]:
        """Places of samples that follow a draft that is not the token which was sampled there."""
        rejected: set[int] = set()
        place = 0
        while place < len(indices):
            drafts = self.plan.draft_token_ids.get(self.plan.rows[indices[place]], [])
            end = place + 1 + len(drafts)
            wrong = next((n for n, draft in enumerate(drafts) if draft != tokens[place + n]), len(drafts))
            rejected.update(range(place + wrong + 1, end))
            place = end
        return frozenset(rejected)

    def broken_rows(self) -> list[int]:
        """Indices into the plan's rows of those with a token that is not finite. Waits for the step."""
        if self.finite is None:
            return []
        finite = self.finite.get()
        if bool(finite.all()):
            return []
        parts = finite[: self.shape.num_tokens].split(self.plan.num_tokens)
        return [index for index, part in enumerate(parts) if not bool(part.all())]
