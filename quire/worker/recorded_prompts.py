"""Steps with prompts in them as graphs: the model's part is recorded once per number of tokens.

Launching a small prefill from the host takes longer than computing it, and of a small model even a large one. All
that a step has to know of its rows goes to the device in one copy; the rest it finds there by itself. What samples is
a second graph, which reads the hidden states that any size of the first leaves in one place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionBatch
from quire.attention.triton import MAX_FEW_ROWS, RecordedLists, RowKinds, TritonAttention, sort_rows
from quire.kernels.triton.step import gather_prompts
from quire.layers.attention import ForwardBatch, WantedTokens
from quire.models.base import CausalLM
from quire.platform.transfer import Download, refresh
from quire.types.step import StepPlan
from quire.worker.block_tables import BlockTables
from quire.worker.graphs import Recorders
from quire.worker.input_batch import PlannedTokens
from quire.worker.request_rows import RequestRows
from quire.worker.sampling.recorded import sample_step
from quire.worker.sampling.sampler import RecordedKind, Sampler

SIZES = (32, 64, 128, 256, 512, 768, 1024)
# A full step is recorded too where computing it, at so many multiplications, may be faster than launching it.
_LAUNCH_BOUND = 8e12
_FULL = 15 / 16  # a step of at least this part of it is padded to the full one
_EXTRA_TILES = 32  # prompts, beyond whole tiles, that a recorded step may hold

_Recording = tuple[Callable[[], None], Tensor]
_Array = TypeVar("_Array", Tensor, NDArray[np.int32])


class _Kinds(NamedTuple):
    """Which kinds of rows a recorded step has kernels for; those for others are left out."""

    singles: bool
    few: bool
    tiles: bool
    whole: bool  # the step is one whole prompt, or the first part of a longer one


# A prompt, beside rows that decode, the end of a prompt whose beginning is cached, and both.
_USUAL = (
    _Kinds(False, False, True, False),
    _Kinds(True, False, True, False),
    _Kinds(False, True, False, False),
    _Kinds(True, True, False, False),
)
_WHOLE = _Kinds(False, False, True, True)
_NOTHING = PlannedTokens(0, [], [], [], [], [])


@dataclass(frozen=True, slots=True)
class _Lists(Generic[_Array]):
    """What a step knows of its rows: parts of one array of int32, each with its own padding."""

    rows: _Array
    wanted: _Array  # the last tokens of rows that sample
    wanted_rows: _Array
    contexts: _Array
    query_starts: _Array
    wanted_contexts: _Array
    singles: tuple[_Array, _Array]  # these as in TritonMetadata
    few: tuple[_Array, _Array]
    tiles: tuple[_Array, _Array]


class _Inputs:
    """The lists of steps of one size, on the host and where the recorded step reads them."""

    def __init__(self, size: int, max_wanted: int, scratch_row: int, device: torch.device) -> None:
        self.max_rows, self.max_wanted = min(size, scratch_row), max_wanted
        self.max_tiles = size // 128 + min(max(_EXTRA_TILES, size // 128), size)
        self._scratch_row = scratch_row
        length = 5 * self.max_rows + 1 + 3 * max_wanted + 2 * MAX_FEW_ROWS + 2 * self.max_tiles
        self._host = np.empty(length, dtype=np.int32)
        self._packed = torch.empty(length, dtype=torch.int32, device=device)
        self._host_lists, self.lists = self._cut(self._host), self._cut(self._packed)
        self.indices = self._packed[: self.max_rows + 2 * max_wanted]  # the first three lists

    def _cut(self, packed: _Array) -> _Lists[_Array]:
        rows, wanted, tiles = self.max_rows, self.max_wanted, self.max_tiles
        end = 0

        def take(length: int) -> _Array:
            nonlocal end
            end += length
            return packed[end - length : end]

        return _Lists(
            rows=take(rows),
            wanted=take(wanted),
            wanted_rows=take(wanted),
            contexts=take(rows),
            query_starts=take(rows + 1),
            wanted_contexts=take(wanted),
            singles=(take(rows), take(rows)),
            few=(take(MAX_FEW_ROWS), take(MAX_FEW_ROWS)),
            tiles=(take(tiles), take(tiles)),
        )

    def have_room_for(self, num_rows: int, kinds: RowKinds) -> bool:
        return num_rows <= self.max_rows and len(kinds.tiles[0]) <= self.max_tiles

    def load(self, rows: list[int], planned: PlannedTokens, kinds: RowKinds) -> None:
        """Send what the next step knows of its rows to the device."""
        lists = self._host_lists
        _put(lists.rows, rows, self._scratch_row)
        _put(lists.wanted, planned.last_tokens, 0)
        _put(lists.wanted_rows, planned.sample_rows, self._scratch_row)
        _put(lists.contexts, planned.contexts, 1)
        _put(lists.query_starts, planned.starts, planned.total)
        _put(lists.wanted_contexts, [planned.contexts[index] for index in planned.sample_indices], 1)
        for mine, theirs in ((lists.singles, kinds.singles), (lists.few, kinds.few), (lists.tiles, kinds.tiles)):
            for part, values in zip(mine, theirs, strict=True):
                _put(part, values, -1)
        refresh(self._packed, torch.from_numpy(self._host))


class RecordedPrompts:
    def __init__(
        self,
        model: CausalLM,
        rows: RequestRows,
        tables: BlockTables,
        backend: AttentionBackend,
        sampler: Sampler,
        recorders: Recorders,
        max_model_len: int,
        max_tokens: int,
        hidden: Tensor,
    ) -> None:
        """`max_tokens` is the size of a full step; hidden [n, hidden_size] has room for all rows that may sample."""
        assert isinstance(backend, TritonAttention)
        self._model, self._rows, self._tables, self._backend = model, rows, tables, backend
        self._sampler, self._max_model_len = sampler, max_model_len
        self._full_size = full_size(model, max_tokens)
        # What one graph leaves for the other: the hidden states of tokens to sample from, and their rows.
        self._hidden = hidden
        self._wanted_rows = torch.full_like(hidden[:, 0], rows.scratch_row, dtype=torch.int64)
        self._query_starts = torch.arange(hidden.shape[0] + 1, dtype=torch.int32, device=hidden.device)
        self._inputs: dict[int, _Inputs] = {}
        self._forwards: dict[tuple[int, _Kinds], _Recording] = {}
        self._samples: dict[tuple[int, RecordedKind], _Recording] = {}
        self._sample: _Recording | None = None
        self._recorders = recorders
        # Kinds of steps that nearly every engine comes to.
        counts = [1 << power for power in range(hidden.shape[0].bit_length())]
        self._usual_samples = iter([(count, sampling) for count in counts for sampling in sampler.usual_kinds])
        sizes = [size for size in SIZES if size <= max_tokens]
        usual = [(size, kinds) for size in sizes for kinds in _USUAL]
        if self._full_size is not None:
            usual += [(self._full_size, kinds) for kinds in (_USUAL[0], _USUAL[1], _WHOLE)]
        self._usual_forwards = iter(usual)

    @torch.inference_mode()
    def record_next(self) -> bool:
        """Record the smallest usual kind of step that is missing; False if none is."""
        for count, sampling in self._usual_samples:
            if (count, sampling) not in self._samples:
                self._sampling(count, sampling)
                return True
        for size, kinds in self._usual_forwards:
            if (size, kinds) not in self._forwards:
                self._inputs_of(size).load([], _NOTHING, RowKinds())
                self._recorded(size, kinds)
                return True
        return False

    @torch.inference_mode()
    def forward(self, plan: StepPlan, planned: PlannedTokens) -> Download | None:
        """Replay the model's part; None if this step must be launched.

        The result, once it has arrived, says of each token whether its values were finite.
        """
        kinds = sort_rows(plan.num_tokens, planned.contexts)
        size = self._size(planned.total)
        if size is None or kinds.whole not in ([], [(0, size)]):
            return None
        inputs = self._inputs_of(size)
        if not inputs.have_room_for(len(plan.rows), kinds):
            return None
        if planned.sample_rows:
            sampling = self._sampler.recorded_kind(planned.sample_rows, bool(plan.mask_slots))
            if sampling is None:
                return None
            self._sample = self._sampling(len(planned.sample_rows), sampling)
        # Loaded first: recording runs the step once, which must write keys and values where they belong.
        inputs.load(plan.rows, planned, kinds)
        present = _Kinds(bool(kinds.singles[0]), bool(kinds.few[0]), bool(kinds.tiles[0]), bool(kinds.whole))
        replay, finite = self._recorded(size, present)
        replay()
        return Download(finite[: planned.total])

    @torch.inference_mode()
    def sample(self) -> Download:
        """Replay the rest, if any row samples: [2, n] int32 as in StepGraphs.run, of those that do."""
        assert self._sample is not None
        replay, out = self._sample
        replay()
        return Download(out)

    def _size(self, count: int) -> int | None:
        """Which recorded size a step is padded to. Those of SIZES compute all tokens, the full one the wanted."""
        if count <= SIZES[-1]:
            return SIZES[bisect_left(SIZES, count)]
        full = self._full_size
        return full if full is not None and _FULL * full <= count <= full else None

    def _inputs_of(self, size: int) -> _Inputs:
        if size not in self._inputs:
            room = self._hidden.shape[0]
            self._inputs[size] = _Inputs(size, room, self._rows.scratch_row, self._hidden.device)
        return self._inputs[size]

    def _recorded(self, size: int, kinds: _Kinds) -> _Recording:
        """The model's part of such steps; recording it computes what its inputs are loaded with."""
        if (size, kinds) not in self._forwards:
            inputs = self._inputs_of(size)
            self._forwards[size, kinds] = self._recorders.forward.record(lambda: self._forward(size, inputs, kinds))
        return self._forwards[size, kinds]

    def _sampling(self, count: int, kind: RecordedKind) -> _Recording:
        """What samples for so many rows; recorded on those that belong to nobody, so that this changes no request."""
        size = 1 << (count - 1).bit_length()
        if (size, kind) not in self._samples:
            self._wanted_rows.fill_(self._rows.scratch_row)
            self._samples[size, kind] = self._recorders.sample.record(lambda: self._sample_step(size, kind))
        return self._samples[size, kind]

    def _sample_step(self, size: int, kind: RecordedKind) -> Tensor:
        logits = self._model.compute_logits(self._hidden[:size])
        return sample_step(kind, self._sampler, logits, self._wanted_rows[:size], self._rows)

    def _forward(self, size: int, inputs: _Inputs, kinds: _Kinds) -> Tensor:
        """Returns whether each token's values are finite."""
        lists, state, tables = inputs.lists, self._rows, self._tables
        lengths = (inputs.max_rows, inputs.max_wanted, inputs.max_wanted)
        rows, wanted, wanted_rows = inputs.indices.long().split(lengths)
        input_ids, positions, slots = gather_prompts(
            rows,
            lists.contexts,
            lists.query_starts,
            state.token_ids,
            state.num_computed,
            tables.tables,
            tables.block_size,
            size,
        )
        recorded = RecordedLists(lists.singles, lists.few, lists.tiles).only(kinds[:3])
        whole = [(0, size)] if kinds.whole else []
        attention = [
            self._backend.prepare_recorded(
                self._batch(group, rows, lists.contexts, lists.query_starts, slots[group]),
                recorded,
                self._max_model_len,
                whole,
            )
            for group in range(tables.num_groups)
        ]
        finite = torch.empty(size, dtype=torch.bool, device=rows.device)
        narrowed = None
        if size > SIZES[-1]:
            narrowed = self._narrowed(wanted, wanted_rows, lists.wanted_contexts, finite)
        hidden = self._model(input_ids, positions, ForwardBatch(list(attention), narrowed))
        if narrowed is None:
            self._backend.note_finite(hidden, finite)
            hidden = hidden.index_select(0, wanted)
        self._hidden.copy_(hidden)
        self._wanted_rows.copy_(wanted_rows)
        return finite

    def _narrowed(self, wanted: Tensor, rows: Tensor, contexts: Tensor, finite: Tensor) -> WantedTokens:
        attention = [
            self._backend.prepare_decode(
                self._batch(group, rows, contexts, self._query_starts, wanted[:0]),
                self._max_model_len,
                self._rows.scratch_row,
                alike=False,
            )
            for group in range(self._tables.num_groups)
        ]
        return WantedTokens(wanted, list(attention), finite)

    def _batch(
        self, group: int, rows: Tensor, contexts: Tensor, query_starts: Tensor, slots: Tensor
    ) -> AttentionBatch:
        return AttentionBatch(
            query_lens=[],
            context_lens=[],
            tables=self._tables.tables[group],
            rows=rows,
            contexts=contexts,
            query_starts=query_starts,
            slot_mapping=slots,
            block_size=self._tables.block_size,
        )


def full_size(model: CausalLM, max_tokens: int) -> int | None:
    """The size of a full step if such steps are recorded."""
    weights = sum(parameter.numel() for parameter in model.parameters())
    return max_tokens if max_tokens > SIZES[-1] and max_tokens * weights <= _LAUNCH_BOUND else None


def largest_size(model: CausalLM, max_tokens: int) -> int:
    """Tokens of the largest step that is recorded."""
    fitting = SIZES[min(bisect_left(SIZES, max_tokens), len(SIZES) - 1)]
    return full_size(model, max_tokens) or fitting


def _put(part: NDArray[np.int32], values: list[int], padding: int) -> None:
    part[: len(values)] = values
    part[len(values) :] = padding
