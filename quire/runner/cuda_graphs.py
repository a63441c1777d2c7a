"""Steps as CUDA graphs: captured once per size and kind, then replayed without the host.

A step is two graphs, forward and sample, that replay back to back unless masks are waited for between them. The first
leaves hidden states and rows to sample from in one place, where the second reads them: so sampling is captured once
for all kinds of forward passes. A decode step needs nothing from the host but, when the batch has changed, its list
of rows; a mixed step takes all it has to know of its rows in one copy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from time import perf_counter
from typing import NamedTuple, Self

import torch
from torch import Tensor

from quire.attention.base import HostLengths
from quire.platform.recording import GraphPool
from quire.platform.transfer import Download, upload
from quire.runner.eager import Eager
from quire.runner.forward import StepProgram
from quire.runner.inputs import StepInputs
from quire.runner.sampling.sampler import Sampler, SamplingKind
from quire.runner.step import Arriving, PlannedTokens, Sampled, SamplePositions, Step
from quire.runner.ways import WayContext
from quire.types.ledger import LedgerLine
from quire.utils.log import get_logger

logger = get_logger(__name__)

# A full step of at most this many multiplications is captured too: run eagerly, launching may outlast computing.
_LAUNCH_BOUND = 8e12
_FULL = 15 / 16  # a step of at least this part of it is padded to the full one
_NOTHING = PlannedTokens(0, [], [], SamplePositions([], [], [], []))

_Graph = tuple[Callable[[], None], Tensor]
_Chain = tuple[int, SamplingKind, Hashable, int]  # what `go_on` is captured for: rows, kinds, decode steps


@dataclass(frozen=True)
class CaptureSizes:
    """Numbers of rows and of tokens that steps are captured for; a step is padded to the next."""

    decode: tuple[int, ...]
    mixed: tuple[int, ...]  # these compute all tokens in every layer
    full: int | None  # the largest step; its last layer computes only the tokens that are sampled from
    drafted: tuple[int, ...] = ()  # numbers of samples of steps with drafts
    speculates: bool = False  # whether such steps are usual
    pools: bool = False  # nothing is sampled: hidden states of all tokens are left
    keeps: bool = False  # what a drafter reads of all tokens is left too
    passes_on: bool = False  # nothing is sampled: hidden states go to the next stage; decode steps alone are captured
    num_drafts: int = 0  # decode steps that usually follow one another

    @property
    def powers(self) -> list[int]:
        """Numbers of samples of other mixed steps."""
        return [1 << power for power in range((self.decode[-1] - 1).bit_length() + 1)]

    @property
    def max_samples(self) -> int:
        return max(*self.powers, *self.drafted)

    @property
    def max_tokens(self) -> int:
        return max(self.decode[-1], self.full or 0, *self.mixed)


def capture_sizes(context: WayContext) -> CaptureSizes | None:
    """Of the sizes that the platform captures, those that the engine can come to; None where nothing is captured."""
    decode, mixed, sizes = context.platform.graph_sizes, context.platform.mixed_graph_sizes, context.sizes
    layers = context.model.attention_layers()
    recordable = all(
        layer.recordable and context.backends.of(layer.keeps.form).captures_spec(layer.spec, context.dtype)
        for layer in layers
    )
    if not decode or not context.backend.records or not recordable:
        return None
    decode = decode[: bisect_left(decode, sizes.max_num_seqs) + 1]
    mixed = mixed[: bisect_left(mixed, sizes.max_num_batched_tokens) + 1]
    weights = sum(parameter.numel() for parameter in context.model.parameters())
    full = sizes.max_num_batched_tokens
    is_bound = full > mixed[-1] and full * weights <= _LAUNCH_BOUND
    most = -(-(decode[-1] + sizes.max_num_drafts) // 32) * 32
    drafted = (*(size for size in context.platform.graph_sizes if size < most and _is_coarse(size)), most)
    full_size = full if is_bound and not context.passes_on else None
    kinds = {"pools": context.pools, "keeps": context.kept_width > 0, "passes_on": context.passes_on}
    return CaptureSizes(decode, mixed, full_size, drafted, sizes.speculates, **kinds, num_drafts=context.num_drafts)


def _is_coarse(size: int) -> bool:
    """Of numbers of samples with drafts nearly each step has another, and padding them costs next to nothing."""
    return size.bit_count() == 1 or size % 64 == 0


class GraphBytes(NamedTuple):
    """Memory of captured steps: of forward passes, and of what samples."""

    forward: int
    sample: int


def graph_bytes(context: WayContext, captured: CaptureSizes) -> GraphBytes:
    """What the largest captured steps take, with an eighth for gaps."""
    sizes, layers = context.sizes, context.model.attention_layers()
    own = [(context.backends.of(layer.keeps.form), layer.spec) for layer in layers]
    sums = max((one.parts_bytes(spec, sizes.max_num_seqs, sizes.max_model_len) for one, spec in own), default=0)
    forward = int(1.125 * (captured.max_tokens * sizes.token_bytes + sums))
    drafting = int(captured.decode[-1] * sizes.token_bytes + sums) if context.num_drafts else 0  # both in one graph
    return GraphBytes(forward, 0 if context.pools else Sampler.captured_bytes(sizes) + drafting)


class _Forward(NamedTuple):
    """What a forward pass is captured for."""

    size: int
    is_decode: bool
    kind: Hashable
    adapted: bool = False
    every_token: bool = False  # hidden states of all tokens are left


class CudaGraphs:
    name = "CUDA graph"

    def __init__(
        self,
        program: StepProgram,
        sizes: CaptureSizes,
        forward: GraphPool,
        sample: GraphPool,
        hidden: Tensor,
        every_hidden: Tensor | None = None,
    ) -> None:
        """hidden [max_samples, hidden_size]: what one graph leaves for the other.

        `every_hidden` [max_tokens, kept_width]: where what is read of all tokens is left, if anything is.
        """
        self._every_hidden = every_hidden
        self._leaves_last = every_hidden is not None and not program.taps  # so every layer computes all tokens
        self._program, self._sizes, self._hidden = program, sizes, hidden
        self.step_sizes = sizes.mixed
        self._forward_pool, self._sample_pool = forward, sample
        self._sample_rows = torch.full_like(hidden[:, 0], program.rows.scratch_row, dtype=torch.int64)
        self._ahead = torch.zeros_like(self._sample_rows, dtype=torch.int32)  # of steps with drafts
        self._inputs: dict[int, StepInputs] = {}
        self._forwards: dict[_Forward, _Graph] = {}
        self._samples: dict[tuple[int, SamplingKind], _Graph] = {}
        self._chains: dict[_Chain, _Graph] = {}
        self._loaded: list[int] = []  # the rows of the last decode step, if the buffer still holds them
        self._loaded_adapted = False  # and whether one of them had an adapter
        self._decode: _Graph | None = None  # and its graph
        self._sample_size = 0
        self._speculates = sizes.speculates
        self._usual = self._usual_captures()

    @staticmethod
    def contributes(context: WayContext) -> Iterable[LedgerLine]:
        captured = capture_sizes(context)
        if captured is not None:
            taken = graph_bytes(context, captured)
            yield LedgerLine("CUDA graphs", taken.forward, f"forward passes of up to {captured.max_tokens} tokens")
            if not context.passes_on:
                yield LedgerLine("CUDA graphs, sampling", taken.sample, f"of {context.sizes.max_num_samples} rows")
            if captured.keeps:
                num_bytes = captured.max_tokens * context.kept_width * context.dtype.itemsize
                yield LedgerLine("CUDA graphs, hidden states", num_bytes, f"of {captured.max_tokens} tokens")

    @classmethod
    def make(cls, context: WayContext, program: StepProgram, eager: Eager, room: int) -> Self | None:
        captured = capture_sizes(context)
        if captured is None or not program.inputs.captures:
            return None
        taken, platform = graph_bytes(context, captured), context.platform
        pools = (platform.graph_pool(taken.forward), platform.graph_pool(taken.sample))
        width, every_hidden = context.sizes.hidden_size, None
        hidden = platform.zeros((captured.max_samples, width), context.dtype)
        if captured.keeps:
            every_hidden = platform.zeros((captured.max_tokens, context.kept_width), context.dtype)
        return cls(program, captured, *pools, hidden, every_hidden)

    def forward(self, step: Step) -> bool:
        known = self._num_captured
        taken = self._take(step)
        step.captured = self._num_captured > known
        return taken

    @property
    def _num_captured(self) -> int:
        return len(self._forwards) + len(self._samples) + len(self._chains)

    @torch.inference_mode()
    def _take(self, step: Step) -> bool:
        shape = step.shape
        if self._sizes.passes_on:
            return self._forward_handed_on(step)
        pools = self._sizes.pools
        if shape.sampling.drafted and not self._speculates:  # one prediction is seldom the last
            self._speculates, self._usual = True, self._usual_captures()
        if shape.eager or shape.sampling.eager or (shape.every_token and not self._leaves_last):
            return False
        if shape.is_decode and not pools:
            return shape.num_rows <= self._sizes.decode[-1] and self._forward_decode(step)
        return self._forward_mixed(step)

    @torch.inference_mode()
    def sample(self, step: Step) -> None:
        kind, rows, known = step.shape.sampling, step.sample_rows, self._num_captured
        replay, out = self._sampling(self._sample_size, kind)
        step.captured |= self._num_captured > known
        replay()
        step.sampled = Sampled(Download(out))
        if kind.logprobs is not None:
            wanted = self._program.sampler.wanted_logprobs(rows)
            step.sampled.logprobs, step.sampled.offset = step.sampled.tokens, 2
            step.sampled.places = step.sampled.lines = list(wanted)
            step.sampled.counts = list(wanted.values())

    @torch.inference_mode()
    def go_on(
        self, rows: list[int], hidden: Tensor | None, kind: SamplingKind, count: int
    ) -> tuple[Arriving, Tensor] | None:
        state, count_rows = self._program.rows, len(rows)
        if kind.eager or count_rows > self._sizes.decode[-1]:
            return None
        size = self._sizes.decode[bisect_left(self._sizes.decode, count_rows)]
        attention = self._program.backend.decode_kind([state.host_num_computed[row] for row in rows], size)
        given = None if hidden is None else hidden[:count_rows]
        key = (size, kind, attention, count)
        if given is not None and key not in self._chains:
            given = given.clone()  # it may lie where the capture writes
        replay, out = self._going_on(key)
        if given is not None and given.data_ptr() != self._hidden.data_ptr():
            self._hidden[:count_rows] = given
        self._hidden[count_rows:size].zero_()  # what lies there may be of a row that broke
        padded = [*rows, *[state.scratch_row] * (size - count_rows)]
        self._sample_rows[:size] = upload(padded, self._sample_rows.device, torch.int64)
        self._loaded, self._decode = [], None
        replay()
        return Download(out), self._hidden

    def _going_on(self, key: _Chain) -> _Graph:
        if key not in self._chains:
            self._loaded, self._decode = [], None
            self._sample_rows.fill_(self._program.rows.scratch_row)
            self._chains[key] = self._sample_pool.capture(lambda: self._run_on(*key))
        return self._chains[key]

    def _run_on(self, size: int, kind: SamplingKind, attention: Hashable, count: int) -> Tensor:
        place = (self._sample_rows[:size], self._hidden[:size])
        *found, hidden = self._program.go_on(*place, kind, attention, self._ahead[:size], count)
        self._hidden[:size].copy_(hidden)
        return torch.stack(found)

    @torch.inference_mode()
    def capture_next(self) -> bool:
        return next(self._usual, False)

    def _forward_handed_on(self, step: Step) -> bool:
        shape = step.shape
        if shape.eager or not shape.is_decode or shape.num_rows > self._sizes.decode[-1]:
            return False
        return self._forward_decode(step)

    def _forward_decode(self, step: Step) -> bool:
        rows = step.plan.rows
        adapted = step.shape.adapted
        if self._decode is None or rows != self._loaded or adapted != self._loaded_adapted:
            size = self._sizes.decode[bisect_left(self._sizes.decode, len(rows))]
            computed = self._program.rows.host_num_computed
            kind = self._program.backend.decode_kind([computed[row] for row in rows], size)
            self._decode = self._of_step(_Forward(size, True, kind, adapted))
            if not self._sizes.passes_on:
                self._sampling(size, step.shape.sampling)  # captured before the rows are there: it overwrites them
            padding = [self._program.rows.scratch_row] * (size - len(rows))
            self._sample_rows[:size] = upload([*rows, *padding], self._sample_rows.device, torch.int64)
            self._loaded, self._loaded_adapted, self._sample_size = list(rows), adapted, size
        elif not self._sizes.passes_on and (self._sample_size, step.shape.sampling) not in self._samples:
            self._decode = None
            return self._forward_decode(step)
        self._decode[0]()
        step.hidden, step.every_hidden = self._hidden, self._every_hidden if self._sizes.keeps else self._hidden
        return True

    def _forward_mixed(self, step: Step) -> bool:
        tokens, plan = step.tokens, step.plan
        size = self._mixed_size(tokens.total)
        if size is None:
            return False
        work = self._program.backend.divide(HostLengths(plan.num_tokens, tokens.contexts, tokens.attended))
        inputs, num_samples = self._inputs_of(size), len(tokens.samples)
        captured = self._sizes.drafted if step.shape.sampling.drafted else self._sizes.powers
        if (
            not self._program.backend.captures(work, size)
            or not inputs.has_room_for(len(plan.rows), work.lists)
            or num_samples > (inputs.max_samples if self._sizes.pools else captured[-1])
        ):
            return False
        self._decode = None
        every_token = self._leaves_last and (step.shape.every_token or size != self._sizes.full)
        replay, finite = self._of_step(_Forward(size, False, work.kind, step.shape.adapted, every_token))
        step.hidden = self._hidden
        step.every_hidden = self._every_hidden if every_token or self._program.taps else None
        if num_samples and not self._sizes.pools:
            self._sample_size = captured[bisect_left(captured, num_samples)]
            self._sampling(self._sample_size, step.shape.sampling)
        inputs.load(plan.rows, tokens, work.lists, step.shape.places_drafts)
        if step.shape.places_drafts:
            self._program.place_drafts(inputs.lists)
            self._ahead.copy_(inputs.lists.ahead)
        replay()
        step.finite = Download(finite[: tokens.total])
        return True

    def _mixed_size(self, count: int) -> int | None:
        mixed, full = self._sizes.mixed, self._sizes.full
        if count <= mixed[-1]:
            return mixed[bisect_left(mixed, count)]
        return full if full is not None and _FULL * full <= count <= full else None

    def _inputs_of(self, size: int) -> StepInputs:
        if size not in self._inputs:
            scratch = self._program.rows.scratch_row
            max_rows = min(size, scratch)
            lists = self._program.backend.list_lengths(size, max_rows)
            self._inputs[size] = StepInputs(max_rows, self._hidden.shape[0], lists, scratch, self._hidden.device)
        return self._inputs[size]

    def _of_step(self, key: _Forward) -> _Graph:
        """The forward pass of a step that is due: one that is captured only now delays all requests."""
        if key in self._forwards:
            return self._forwards[key]
        begin = perf_counter()
        graph = self._captured(key)
        logger.info("captured a CUDA graph within a step, in %.2f s: %s", perf_counter() - begin, key)
        return graph

    def _captured(self, key: _Forward) -> _Graph:
        """The forward pass of such steps; captured on rows that belong to nobody, so that no request changes."""
        if key not in self._forwards:
            self._loaded, self._decode = [], None
            if key.is_decode:
                self._sample_rows.fill_(self._program.rows.scratch_row)
                self._forwards[key] = self._forward_pool.capture(lambda: self._run_decode(key))
            else:
                inputs = self._inputs_of(key.size)
                inputs.load([], _NOTHING, tuple([] for _ in inputs.lists.work))
                self._forwards[key] = self._forward_pool.capture(lambda: self._run_mixed(key, inputs))
        return self._forwards[key]

    def _sampling(self, size: int, kind: SamplingKind) -> _Graph:
        """The captured sampling for this number of rows."""
        if (size, kind) not in self._samples:
            self._loaded = []
            self._sample_rows.fill_(self._program.rows.scratch_row)
            self._ahead.zero_()
            self._samples[size, kind] = self._sample_pool.capture(
                lambda: self._program.sample(kind, self._hidden[:size], self._sample_rows[:size], self._ahead[:size])
            )
        return self._samples[size, kind]

    def _run_decode(self, key: _Forward) -> Tensor:
        hidden = self._program.decode(self._sample_rows[: key.size], key.kind, adapted=key.adapted)
        self._keep(hidden.kept)
        return self._hidden[: key.size].copy_(hidden.last)

    def _run_mixed(self, key: _Forward, inputs: StepInputs) -> Tensor:
        """Returns whether each token's values are finite."""
        finite = torch.empty(key.size, dtype=torch.bool, device=self._hidden.device)
        narrow = key.size == self._sizes.full and not key.every_token
        lists = inputs.lists
        hidden = self._program.mixed(
            lists, key.size, key.kind, finite, num_tokens=key.size, narrow=narrow, adapted=key.adapted
        )
        self._hidden.copy_(hidden.last if narrow else self._program.select(hidden.last, lists.sample_tokens))
        self._sample_rows.copy_(lists.sample_rows)
        if key.every_token or self._program.taps:
            self._keep(hidden.kept)
        return finite

    def _keep(self, parts: tuple[Tensor, ...]) -> None:
        if self._every_hidden is not None:
            first = 0
            for part in parts:
                self._every_hidden[: len(part), first : first + part.shape[1]].copy_(part)
                first += part.shape[1]

    def _usual_captures(self) -> Iterator[bool]:
        """Captures the kinds of steps that nearly every engine comes to, the smallest first, one at a time."""
        program, sizes, usual = self._program, self._sizes, self._program.sampler.usual_kinds
        for size in () if sizes.pools else sizes.decode:
            alike = program.backend.decode_kind([1] * size, size)
            for kind in dict.fromkeys((program.backend.decode_kind(None, size), alike)):
                if (key := _Forward(size, True, kind)) not in self._forwards:
                    self._captured(key)
                    yield True
        sampled = [(size, kind) for size in sorted({*sizes.decode, *sizes.powers}) for kind in usual]
        if self._speculates:
            sampled += [(size, kind._replace(drafted=True)) for size in sizes.drafted for kind in usual]
        for size, sampling in () if sizes.pools else sampled:
            if (size, sampling) not in self._samples:
                self._sampling(size, sampling)
                yield True
        for size in sizes.decode if sizes.num_drafts else ():
            alike = program.backend.decode_kind([1] * size, size)
            for drafting in ((size, sampling, alike, sizes.num_drafts) for sampling in usual):
                if drafting not in self._chains:
                    self._going_on(drafting)
                    yield True
        full = [] if sizes.full is None else [sizes.full]
        for size in () if sizes.passes_on else chain(sizes.mixed, full):
            for kind in program.backend.usual_kinds(size, program.max_model_len, size == sizes.full):
                for every_token in (False, True) if sizes.pools and size == sizes.full else (self._leaves_last,):
                    if (key := _Forward(size, False, kind, every_token=every_token)) not in self._forwards:
                        self._captured(key)
                        yield True
