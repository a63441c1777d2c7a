"""Steps as lists of CPU kernel calls: traced once when the engine starts, then replayed with one call, at any size.

The forward pass of any step is one list; sampling is another for each kind of it, traced when it first comes up. A
model or a kind of sampling that does more than call kernels runs eagerly.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Self

import torch
from torch import Tensor

from quire.platform.recording import NotRecordableError, SizedRecorder, SizedRecording, SizedStep
from quire.platform.transfer import Download
from quire.runner.eager import Eager
from quire.runner.forward import StepProgram
from quire.runner.inputs import InputLists, StepInputs
from quire.runner.sampling.sampler import SamplingKind
from quire.runner.step import Arrived, Arriving, PlannedTokens, Sampled, SamplePositions, Step
from quire.runner.ways import WayContext
from quire.types.ledger import LedgerLine
from quire.utils.log import get_logger

logger = get_logger(__name__)

# Numbers of tokens, of rows and of samples: the forward pass is traced at the first three, then a replay is compared
# with eager execution at the last.
_TRIALS = ((4, 2, 1), (7, 3, 3), (12, 2, 4))
_CHECK = (10, 4, 3)
# The same for sampling, by the number of rows.
_SAMPLE_TRIALS = ((2,), (5,))
_SAMPLE_CHECK = (3,)
MOST_TOKENS = 12
_MOST_RANKS = 11  # that have more than one row of a trial, so that a recording by rows sees their number
_MOST_ROWS = 5


class KernelList:
    name = "kernel list"
    step_sizes = ()

    def __init__(
        self,
        program: StepProgram,
        recorder: SizedRecorder,
        eager: Eager,
        max_tokens: int,
        max_rows: int,
        max_samples: int,
        pools: bool = False,
        passes_on: bool = False,
        keeps: bool = False,
    ) -> None:
        """No row is in use yet, and the cache has room for MOST_TOKENS."""
        self._program, self._recorder, self._eager = program, recorder, eager
        tokens, rows = max(max_tokens, MOST_TOKENS), max(max_rows, _MOST_ROWS)
        self._limits = (tokens, rows, max(rows, max_samples))
        self._inputs = StepInputs(*self._limits[1:], (), program.rows.scratch_row, program.tables.tables.device)
        self._finite = torch.zeros(tokens, dtype=torch.bool)
        # By the kind and whether the forward pass is adapted, whose hidden states lie elsewhere; None: cannot be.
        self._samples: dict[tuple[SamplingKind, bool], tuple[SizedRecording, Arrived] | None] = {}
        # By whether it is adapted, whether it has the hidden states of all tokens, and whether ranks hold it by rows:
        # what samples is read first, and behind it what is kept of all tokens.
        self._forwards: dict[tuple[bool, bool, bool], SizedRecording] = {}
        group = program.group
        self._splits = group.splits_rows(max_tokens) and group.size <= _MOST_RANKS
        self._chains: dict[tuple[SamplingKind, int], SizedRecording | None] = {}  # of `go_on`
        self._pools = pools
        self._leaves_last = keeps and not program.taps and not pools
        every = (True, False) if pools else (passes_on or self._leaves_last,)
        either = (False, True)
        kinds = itertools.product(either[: 1 + (program.adapters is not None)], every, either[: 1 + self._splits])
        try:
            for kind in kinds:
                self._forwards[kind] = self._record_forward(*kind)
        except NotRecordableError as error:
            logger.info("steps run eagerly: the model %s", error)

    @staticmethod
    def contributes(context: WayContext) -> Iterable[LedgerLine]:
        return ()

    @classmethod
    def make(cls, context: WayContext, program: StepProgram, eager: Eager, room: int) -> Self | None:
        recorder = context.backend.recorder()
        sizes_vary = program.group.replicas is not None  # of what experts exchange, from step to step
        if recorder is None or room < MOST_TOKENS or not program.inputs.captures or sizes_vary:
            return None
        sizes = context.sizes
        limits = (sizes.max_num_batched_tokens, sizes.max_num_seqs, sizes.max_num_samples)
        return cls(program, recorder, eager, *limits, context.pools, context.passes_on, context.kept_width > 0)

    @property
    def is_recorded(self) -> bool:
        return bool(self._forwards)

    def capture_next(self) -> bool:
        """Trace a usual kind of sampling that is missing."""
        if self._pools or not self._forwards:
            return False
        missing = [kind for kind in self._program.sampler.usual_kinds if (kind, False) not in self._samples]
        if missing:
            self._trace_sampling(missing[0], adapted=False)
        return bool(missing)

    @torch.inference_mode()
    def forward(self, step: Step) -> bool:
        shape = step.shape
        by_rows = self._splits and self._program.group.splits_rows(shape.num_tokens)
        forward = self._forwards.get((shape.adapted, shape.every_token, by_rows))
        if forward is None or shape.eager or shape.num_samples > self._limits[2]:
            return False
        # There is no forward pass for no sample: then it has one that nobody reads.
        tokens = step.tokens if shape.num_samples else step.tokens.padded_samples(step.plan, 1)
        self._inputs.load(step.plan.rows, tokens, (), shape.places_drafts)
        if shape.places_drafts:
            self._program.place_drafts(self._part(shape.num_rows, len(tokens.samples)))
        forward(*self._sizes(by_rows, shape.num_tokens, shape.num_rows, len(tokens.samples)))
        step.hidden = forward.results[0]
        if by_rows:  # to where sampling reads
            step.hidden = self._forwards[shape.adapted, shape.every_token, False].results[0]
            step.hidden[: len(tokens.samples)] = forward.results[0][: len(tokens.samples)]
        kept = forward.results[1:]
        if kept:
            step.every_hidden = (
                kept[0] if len(kept) == 1 else torch.cat([part[: shape.num_tokens] for part in kept], 1)
            )
        if not shape.is_decode:  # there the sampler finds it out from the logits
            step.finite = Download(self._finite[: shape.num_tokens])
        return True

    def sample(self, step: Step) -> None:
        kind, adapted = step.shape.sampling, step.shape.adapted
        if (kind, adapted) not in self._samples:
            self._trace_sampling(kind, adapted=adapted)
            step.captured = True
        traced = self._samples[kind, adapted]
        if traced is None:
            self._eager.sample(step)
            return
        recording, results = traced
        recording(step.shape.num_samples)
        step.sampled = Sampled(results)

    def go_on(
        self, rows: list[int], hidden: Tensor | None, kind: SamplingKind, count: int
    ) -> tuple[Arriving, Tensor] | None:
        if (kind, count) not in self._chains:
            self._chains[kind, count] = self._trace_going_on(kind, count)
        recording = self._chains[kind, count]
        if recording is None:
            return None
        self._inputs.lists.sample_rows[: len(rows)] = torch.tensor(rows)
        mine = self._forwards[False, self._leaves_last, False].results[0]
        if hidden is not None and hidden.data_ptr() != mine.data_ptr():
            mine[: len(rows)] = hidden[: len(rows)]
        recording(len(rows))
        *found, left = recording.results
        return Arrived(torch.stack([each[: len(rows)] for each in found])), left

    @torch.inference_mode()
    def _trace_going_on(self, kind: SamplingKind, count: int) -> SizedRecording | None:
        forward = self._forwards.get((False, self._leaves_last, False))
        if forward is None or kind.eager:
            return None
        program, lists, hidden = self._program, self._inputs.lists, forward.results[0]

        def run(num_rows: int) -> tuple[Tensor, ...]:
            place = (lists.sample_rows[:num_rows], hidden[:num_rows])
            return program.go_on(*place, kind, None, lists.ahead[:num_rows], count)

        try:
            return self._record_rows(run, hidden, alike=True)  # all write to one place of the cache
        except NotRecordableError as error:
            logger.info("drafts run eagerly: the model %s", error)
            return None

    @torch.inference_mode()
    def _record_forward(self, adapted: bool, every_token: bool, by_rows: bool) -> SizedRecording:
        run = partial(self._run_forward, adapted, not every_token, by_rows)
        most, *others = self._limits
        if self._splits and not by_rows:  # longer steps are held by rows
            most = max(MOST_TOKENS, min(most, self._program.group.row_threshold))
        sizes = partial(self._sizes, by_rows)
        with self._scratch_sequence():
            try:
                recording = self._recorder.record(run, [sizes(*each) for each in _TRIALS], sizes(most, *others))
            except NotRecordableError:
                self._load_trial(*_CHECK)
                run(*_CHECK)  # twice: another rank, which may have a recording, exchanges sums with this one
                run(*_CHECK)
                raise
            self._load_trial(*_CHECK)
            expected = run(*_CHECK)
            recording(*sizes(*_CHECK))
            for mine, other in zip(recording.results, expected, strict=True):
                if not torch.equal(mine[: len(other)], other):
                    raise NotRecordableError("does more than call kernels")
        return recording

    def _sizes(self, by_rows: bool, num_tokens: int, *others: int) -> tuple[int, ...]:
        """What a recording is called with: by rows, also how many of them a rank holds."""
        return (num_tokens, *others, *([-(-num_tokens // self._program.group.size)] if by_rows else []))

    def _run_forward(
        self, adapted: bool, narrow: bool, by_rows: bool, num_tokens: int, num_rows: int, num_samples: int, _: int = 0
    ) -> list[Tensor]:
        """The forward pass of what the buffers hold: what samples is read, and what is kept of all tokens."""
        part, finite, program = self._part(num_rows, num_samples), self._finite[:num_tokens], self._program
        sizes = (part, num_tokens, None, finite)
        hidden = program.mixed(*sizes, num_tokens=num_tokens, narrow=narrow, adapted=adapted, by_rows=by_rows)
        kept = hidden.kept if program.taps or not narrow else ()
        return [hidden.last if narrow else program.select(hidden.last, part.sample_tokens), *kept]

    def _part(self, num_rows: int, num_samples: int) -> InputLists[Tensor]:
        lists = self._inputs.lists
        return InputLists(
            rows=lists.rows[:num_rows],
            sample_tokens=lists.sample_tokens[:num_samples],
            sample_rows=lists.sample_rows[:num_samples],
            contexts=lists.contexts[:num_rows],
            attended=lists.attended[:num_rows],
            query_starts=lists.query_starts[: num_rows + 1],
            sample_contexts=lists.sample_contexts[:num_samples],
            ahead=lists.ahead[:num_samples],
            drafts=lists.drafts[:num_samples],
            work=(),
        )

    @torch.inference_mode()
    def _trace_sampling(self, kind: SamplingKind, *, adapted: bool) -> None:
        self._samples[kind, adapted] = None
        if kind.eager or kind.logprobs is not None:
            return
        try:
            recording = self._record_sampling(kind, adapted=adapted)
        except NotRecordableError as error:
            logger.info("some sampling runs eagerly: it %s", error)
        else:
            self._samples[kind, adapted] = (recording, Arrived(recording.results[0]))

    def _record_sampling(self, kind: SamplingKind, *, adapted: bool) -> SizedRecording:
        program, lists = self._program, self._inputs.lists
        hidden = self._forwards[adapted, self._leaves_last, False].results[0]

        def run(count: int) -> list[Tensor]:
            return [program.sample(kind, hidden[:count], lists.sample_rows[:count], lists.ahead[:count])]

        return self._record_rows(run, hidden)

    def _record_rows(self, run: SizedStep, hidden: Tensor, *, alike: bool = False) -> SizedRecording:
        """Of a number of rows that read `hidden`: traced, and compared with eager execution, maybe on one row."""
        lists = self._inputs.lists
        kept = hidden[: _SAMPLE_CHECK[0]].clone(), lists.sample_rows[:_MOST_ROWS].clone()
        try:
            lists.sample_rows[:_MOST_ROWS] = self._program.rows.scratch_row
            recording = self._recorder.record(run, _SAMPLE_TRIALS, self._limits[2:])
            trial = torch.linspace(-1, 1, kept[0].numel()).view(kept[0].shape)
            hidden[: _SAMPLE_CHECK[0]] = trial[:1] if alike else trial
            expected = [each.clone() for each in run(*_SAMPLE_CHECK)]
            recording(*_SAMPLE_CHECK)
            for mine, other in zip(recording.results, expected, strict=True):
                if not torch.equal(mine[: len(other)], other):
                    raise NotRecordableError("does more than call kernels")
        finally:
            hidden[: _SAMPLE_CHECK[0]], lists.sample_rows[:_MOST_ROWS] = kept
        return recording

    def _load_trial(self, num_tokens: int, num_rows: int, num_samples: int) -> None:
        """Rows that continue each other: the first has all tokens but one for each other row."""
        first = num_tokens - num_rows + 1
        scratch = self._program.rows.scratch_row
        tokens = PlannedTokens(
            total=num_tokens,
            starts=[0, *range(first, num_tokens)],
            contexts=list(range(first, num_tokens + 1)),
            samples=SamplePositions(
                indices=list(range(num_samples)),
                rows=[scratch] * num_samples,
                tokens=list(range(first - 1, first - 1 + num_samples)),
                lengths=list(range(first, first + num_samples)),
            ),
        )
        self._inputs.load([scratch] * num_rows, tokens, ())

    @contextmanager
    def _scratch_sequence(self) -> Iterator[None]:
        """Give the scratch row some tokens and the first blocks, and leave nothing of it behind."""
        rows, tables = self._program.rows, self._program.tables
        blocks = 1 + torch.arange(-(-MOST_TOKENS // tables.block_size))
        table = tables.tables[:, rows.scratch_row, : len(blocks)]
        table[:] = blocks
        tokens = rows.token_ids[rows.scratch_row, :MOST_TOKENS]
        tokens[:] = torch.arange(len(tokens), dtype=torch.int32)
        try:
            yield
        finally:
            table.zero_()
            tokens.zero_()
            rows.num_computed[rows.scratch_row] = 0
            for layer in self._program.model.cached_layers():
                layer.heal(blocks)
