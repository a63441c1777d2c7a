"""The description of a step: gather inputs -> attention metadata -> forward, then logits -> sample -> append.

Written once, over ops that every device has. How it runs is apart from it: eagerly, captured as CUDA graphs, or as a
list of CPU kernel calls.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from quire.attention.base import AttentionBatch, AttentionMetadata, HostLengths
from quire.attention.groups import GroupBackends
from quire.layers.adapters import AdapterTokens
from quire.layers.attention import ForwardBatch, WantedTokens
from quire.models.base import Model
from quire.models.decoder import DecoderLM
from quire.models.token_inputs import PLAIN_INPUTS, TokenInputs
from quire.ops.base import Target
from quire.ops.select import GATHER_ROWS
from quire.ops.step import GATHER_DECODE, GATHER_MIXED, PLACE_DRAFTS
from quire.parallel.groups import ParallelGroup
from quire.runner.inputs import InputLists
from quire.runner.request_rows import BlockTables, RequestRows
from quire.runner.sampling.sampler import Sampler, SamplingKind


class Hidden(NamedTuple):
    """What a forward pass gives."""

    last: Tensor  # [n, hidden], after the last layer
    kept: tuple[Tensor, ...]  # [n, hidden] each: what a drafter reads of all tokens, else the same as `last`


class StepProgram:
    def __init__(
        self,
        model: Model,
        rows: RequestRows,
        tables: BlockTables,
        backend: GroupBackends,
        sampler: Sampler,
        max_model_len: int,
        inputs: TokenInputs = PLAIN_INPUTS,
        adapters: AdapterTokens | None = None,
        max_samples: int = 0,
        group: ParallelGroup | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`max_samples`: places of a step that are sampled, if more than there are rows; `dtype`: of hidden states.

        `group`: the ranks that may hold a long step's residual stream by rows.
        """
        self.inputs, self.adapters, self.group = inputs, adapters, group or ParallelGroup()
        self.model, self.rows, self.tables, self.backend, self.sampler = model, rows, tables, backend, sampler
        self.max_model_len = max_model_len
        platform = tables.tables.device.type
        target, hidden = Target(platform), Target(platform, dtype)
        self._gather_decode, self._gather_mixed = GATHER_DECODE.bind(target), GATHER_MIXED.bind(target)
        self.select, self._place_drafts = GATHER_ROWS.bind(hidden), PLACE_DRAFTS.bind(target)
        limit = 2 * max(8, rows.scratch_row, max_samples)  # samples are padded, to less than twice their number
        self._single_starts = torch.arange(limit + 1, dtype=torch.int32, device=tables.tables.device)

    def decode(self, rows: Tensor, kind: Hashable, *, adapted: bool = False) -> Hidden:
        """Hidden states [n, hidden] of rows [n] int64 that each compute their one last known token.

        `adapted`: adapters of rows count.
        """
        state, tables, count = self.rows, self.tables, rows.shape[0]
        input_ids, index, contexts, *slots = self._gather_decode(
            rows, state.token_ids, state.num_computed, tables.tables, tables.block_size
        )
        attention = self._single_queries(rows, contexts, slots, kind, None)
        batch = ForwardBatch(attention, adapters=self.adapters if adapted else None)
        hidden = self._run(input_ids, index, rows, self._single_starts[: count + 1], batch)
        assert hidden.last.shape[0] == count
        return hidden

    def go_on(
        self, rows: Tensor, hidden: Tensor | None, kind: SamplingKind, attention: Hashable, ahead: Tensor, count: int
    ) -> tuple[Tensor, ...]:
        """`count` decode steps, one after the other: what each samples for rows [n], see `sample`, and hidden states.

        hidden [n, hidden] are those that the rows' last tokens were sampled from, for what reads its own.
        """
        found = []
        try:
            for _ in range(count):
                self.inputs.give(hidden)
                hidden = self.decode(rows, attention).last
                found.append(self.sample(kind, hidden, rows, ahead))
        finally:
            self.inputs.give(None)
        assert hidden is not None
        return *found, hidden

    def mixed(
        self,
        lists: InputLists[Tensor],
        size: int,
        kind: Hashable,
        finite: Tensor,
        *,
        num_tokens: int,
        narrow: bool,
        adapted: bool = False,
        lengths: HostLengths | None = None,
        sample_lengths: HostLengths | None = None,
        max_context: int | None = None,
        by_rows: bool | None = None,
    ) -> Hidden:
        """Hidden states of rows with any numbers of tokens; writes to finite [size] bool whether each token's are.

        The tokens are padded to `size`; without padding there are at most `num_tokens`. With `narrow` the last layer
        computes only the tokens that are sampled from, and hidden states are of those; else of all tokens.
        `by_rows`: whether ranks split the residual stream; None: by the number of tokens.
        """
        state, tables = self.rows, self.tables
        rows, contexts, starts = lists.rows, lists.contexts, lists.query_starts
        input_ids, index, *slots = self._gather_mixed(
            rows, contexts, starts, state.token_ids, state.num_computed, tables.tables, tables.block_size, size
        )
        most = max_context or self.max_model_len
        work = (kind, lists.work)
        attention = self._prepare(rows, contexts, starts, slots, work, num_tokens, most, lengths, lists.attended)
        wanted = None
        if narrow:
            nothing = [of_group[:0] for of_group in slots]  # nothing is written
            decode = self.backend.decode_kind(None, lists.sample_rows.shape[0])
            place = (lists.sample_rows, lists.sample_contexts, nothing, decode, sample_lengths)
            wanted = WantedTokens(lists.sample_tokens, self._single_queries(*place), finite)
        batch = ForwardBatch(attention, wanted, self.adapters if adapted else None, lengths)
        hidden = self._run(input_ids, index, rows, starts, batch, by_rows)
        if not narrow:
            self.backend.note_finite(hidden.last, finite)
        return hidden

    def _run(
        self,
        input_ids: Tensor,
        index: Tensor,
        rows: Tensor,
        starts: Tensor,
        batch: ForwardBatch,
        by_rows: bool | None = None,
    ) -> Hidden:
        """The model over tokens at `index` of their sequences, which their slots have followed."""
        count, adapters = input_ids.shape[0], batch.adapters
        by_rows = self.group.splits_rows(count) if by_rows is None else by_rows
        adapted = nullcontext() if adapters is None else adapters.of_tokens(rows, starts, count)
        with adapted, self.group.rows.of_step(count if by_rows else 0):
            positions = self.inputs.rotary_positions(index, rows, starts)
            embeds = self.inputs.embeds(input_ids, index, rows, starts)
            if isinstance(self.model, DecoderLM):
                last, tapped = self.model.forward_tapped(input_ids, positions, batch, embeds)
                return Hidden(last, tapped or (last,))
            hidden: Tensor = self.model(input_ids, positions, batch, embeds)
        return Hidden(hidden, (hidden,))

    @property
    def taps(self) -> bool:
        """Whether a drafter reads layers before the last."""
        return isinstance(self.model, DecoderLM) and bool(self.model.taps)

    def place_drafts(self, lists: InputLists[Tensor]) -> None:
        """Put a step's drafts behind the known tokens of their rows, and correct the lists' contexts. No sync."""
        state = self.rows
        samples = (lists.sample_rows, lists.ahead, lists.drafts, lists.sample_contexts)
        known = (state.token_ids, state.num_tokens, state.num_computed)
        self._place_drafts(lists.rows, lists.query_starts, lists.contexts, *samples, *known)

    def sample(self, kind: SamplingKind, hidden: Tensor, rows: Tensor, ahead: Tensor) -> Tensor:
        """Choose and append a token for each of rows [m] from hidden states [m, hidden], with drafts `ahead` of it.

        Returns [m, 2] int32 as Sampler.sample does, with packed log-probabilities behind where the kind has them.
        """
        with nullcontext() if self.adapters is None or not kind.adapted else self.adapters.of_samples(rows):
            logits = self.model.compute_logits(hidden, not kind.candidates)
        out = self.sampler.sample(kind, logits, rows, self.rows, ahead if kind.drafted else None)
        if kind.logprobs is None:
            return out
        return torch.cat([out, self.sampler.logprobs(logits, out[:, 0].contiguous(), kind.logprobs)], dim=1)

    def _single_queries(
        self, rows: Tensor, contexts: Tensor, slots: Sequence[Tensor], kind: Hashable, lengths: HostLengths | None
    ) -> list[AttentionMetadata]:
        count, most = rows.shape[0], self.max_model_len if lengths is None else max(lengths.contexts)
        starts = self._single_starts[: count + 1]
        return self._prepare(rows, contexts, starts, slots, (kind, ()), count, most, lengths)

    def _prepare(
        self,
        rows: Tensor,
        contexts: Tensor,
        starts: Tensor,
        slots: Sequence[Tensor],
        work: tuple[Hashable, tuple[Tensor, ...]],
        num_tokens: int,
        max_context: int,
        lengths: HostLengths | None,
        attended: Tensor | None = None,
    ) -> list[AttentionMetadata]:
        """What the backend of each KV group prepares; `work`: the kind of a WorkPlan, and its lists on the device."""
        tables, shared = self.tables, (num_tokens, max_context, self.rows.scratch_row, lengths, attended)
        return [
            self.backend.prepare(
                group,
                AttentionBatch(tables.tables[group], rows, contexts, starts, of_group, tables.block_size, *shared),
                *work,
            )
            for group, of_group in enumerate(slots)
        ]
