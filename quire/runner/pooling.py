"""Pooling: another result of a step. Hidden states of a prompt become a vector, chunk by chunk as it is computed,
and the vector what the model's head makes of it.

A row's sums are over tiles of tokens at absolute positions, and a tile that a chunk leaves unfinished waits for the
next one: so a prompt computed in chunks gives the bits of one computed at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from quire.models.base import Model
from quire.ops.base import Target
from quire.ops.encoder import ACTIVATIONS, PROMPT_SUMS, TILE, tile_sums
from quire.platform.transfer import Download, upload
from quire.runner.prompt_logprobs import LogitsHead
from quire.runner.step import PooledRows, Step
from quire.types.errors import EngineError
from quire.types.sampling import Activation, PoolingKind, PoolingParams, SamplingParams
from quire.types.step import RowStart


class NoPooling:
    """Of an engine that generates."""

    def add_request(self, start: RowStart) -> None:
        if isinstance(start.params, PoolingParams):
            raise EngineError(f"request {start.request_id!r} wants a vector, but this engine generates tokens")

    def remove_request(self, row: int) -> None:
        """Forget the row; one that is not there does no harm."""

    def wants_every_token(self, rows: list[int]) -> bool:
        """Whether one of these rows reads more than the hidden state of its last token."""
        return False

    def read(self, step: Step) -> bool:
        """Take in the hidden states of a step whose forward pass was started; False if some of its rows sample."""
        return False


class _Reading(NamedTuple):
    """What becomes of a vector of hidden states; rows that are alike in it are computed together."""

    head: str | None
    activation: Activation
    dimensions: int | None
    label_token_ids: tuple[int, ...]


@dataclass(slots=True)
class _Row:
    kind: PoolingKind
    reading: _Reading
    num_tokens: int = 0  # taken in so far
    every_token: bool = True  # hidden states of all tokens are computed
    total: Tensor | None = None  # [hidden] float32: sum of the whole tiles, or the one hidden state that counts
    kept: list[Tensor] = field(default_factory=list)  # [n, hidden] of the tile begun, or of the tokens that count
    places: list[int] | None = None  # of the tokens that count, in the prompt; None: all


class PooledHeads:
    """The heads of a model, over rows that are padded to the sizes that the self-check proved invariant."""

    def __init__(self, model: Model, logits: LogitsHead, ladder: list[int], target: Target) -> None:
        self._model, self._logits, self._ladder, self._dtype = model, logits, ladder, target.dtype
        self.prompt_sums = PROMPT_SUMS.bind(target)

    def __call__(self, hidden: Tensor, reading: _Reading) -> Tensor:
        """[m, hidden] -> [m, size] float32."""
        if reading.label_token_ids:
            return self._label_logits(hidden.to(self._dtype), list(reading.label_token_ids))
        if reading.head is None:
            return hidden.float()
        return self._applied(hidden.to(self._dtype), reading.head).float()

    def _applied(self, hidden: Tensor, name: str) -> Tensor:
        count = hidden.shape[0]
        if self._ladder:
            size = self._ladder[bisect_left(self._ladder, count)]
            hidden = torch.nn.functional.pad(hidden, (0, 0, 0, size - count))
        out: Tensor = self._model.head(name)(hidden)
        return out[:count]

    def _label_logits(self, hidden: Tensor, labels: list[int]) -> Tensor:
        parts = [self._logits(part)[:, labels].float() for part in hidden.split(self._logits.max_rows)]
        values = torch.cat(parts)
        return values[:, 1:] - values[:, :1] if len(labels) == 2 else values


class Pooler(NoPooling):
    """Of an engine that pools."""

    def __init__(self, heads: PooledHeads, *, generates: bool = False) -> None:
        """`generates`: rows that sample run beside those that pool."""
        self._heads, self._generates = heads, generates
        self._rows: dict[int, _Row] = {}

    def add_request(self, start: RowStart) -> None:
        params = start.params
        if self._generates and isinstance(params, SamplingParams):
            return
        if not isinstance(params, PoolingParams) or params.pooling is None:
            raise EngineError(f"request {start.request_id!r} does not say how to pool, and this engine only pools")
        activation = params.activation or ("none" if params.use_activation is False else "normalize")
        reading = _Reading(params.head, activation, params.dimensions, params.label_token_ids)
        every_token = params.pooling != "last" or params.attended_tokens is not None
        row = self._rows[start.row] = _Row(params.pooling, reading, start.num_computed_tokens, every_token)
        if params.pooling == "step":
            row.places = [at for at, token in enumerate(start.token_ids) if token == params.step_tag_id]
        elif params.skip_token_ids:
            skipped = set(params.skip_token_ids)
            row.places = [at for at, token in enumerate(start.token_ids) if token not in skipped]

    def remove_request(self, row: int) -> None:
        self._rows.pop(row, None)

    def wants_every_token(self, rows: list[int]) -> bool:
        return any(row in self._rows and self._rows[row].every_token for row in rows)

    @torch.inference_mode()
    def read(self, step: Step) -> bool:
        ends, starts = frozenset(step.sample_indices), _starts(step)
        whole: dict[tuple[PoolingKind, _Reading], list[int]] = {}  # rows that need nothing from steps before
        for index, (row, count) in enumerate(zip(step.plan.rows, step.plan.num_tokens, strict=True)):
            if row not in self._rows:
                continue
            state, is_last = self._rows[row], index in ends
            if is_last and (state.kind == "last" or (state.kind in ("cls", "mean") and not state.num_tokens)):
                whole.setdefault((state.kind, state.reading), []).append(index)
                continue
            if state.kind != "last":
                assert step.every_hidden is not None
                self._take(state, step.every_hidden[starts[index] : starts[index] + count], is_last)
            state.num_tokens += count
            if is_last:
                self._finish(step, index, state)
        for (kind, reading), indices in whole.items():
            values = self._heads(self._vectors(step, kind, indices), reading)
            step.pooled.append(PooledRows(indices, Download(_finished(values, reading))))
        return all(row in self._rows for row in step.sample_rows)

    def _vectors(self, step: Step, kind: PoolingKind, indices: list[int]) -> Tensor:
        """[m, hidden] float32 of rows that end in this step, all at once."""
        if kind == "last":
            assert step.hidden is not None
            places = {index: place for place, index in enumerate(step.sample_indices)}
            return self._rows_of(step.hidden, [places[index] for index in indices])
        hidden, starts, counts = step.every_hidden, _starts(step), step.plan.num_tokens
        assert hidden is not None
        first, lengths = [starts[index] for index in indices], [counts[index] for index in indices]
        if kind == "cls":
            return self._rows_of(hidden, first)
        return _means(self._heads.prompt_sums(hidden, first, lengths), lengths)

    @staticmethod
    def _rows_of(hidden: Tensor, rows: list[int]) -> Tensor:
        return hidden.index_select(0, upload(rows, hidden.device, torch.int64)).float()

    def _finish(self, step: Step, index: int, state: _Row) -> None:
        """Hand out what was taken in of a row over several steps, or of all its tokens."""
        if is_matrix := state.kind in ("all", "step"):
            values = torch.cat(state.kept)
        else:
            assert state.total is not None
            values = state.total[None]
            if state.kind != "max":
                values = _means(values, [state.num_tokens]) if state.kind == "mean" else values
                values = self._heads(values, state.reading)
        step.pooled.append(PooledRows([index], Download(_finished(values, state.reading)), is_matrix))

    def _take(self, state: _Row, hidden: Tensor, is_last: bool) -> None:
        """Take in the hidden states [n, hidden] of a row's next tokens."""
        if state.kind == "cls":
            if state.num_tokens == 0:
                state.total = hidden[0].float().clone()  # the next step may overwrite hidden states
        elif state.kind == "mean":
            _take_sum(state, hidden, is_last)
        elif state.kind in ("all", "step"):
            if state.places is not None:
                first, end = state.num_tokens, state.num_tokens + hidden.shape[0]
                here = [at - first for at in state.places if first <= at < end]
                hidden = hidden.index_select(0, upload(here, hidden.device, torch.int64))
            if len(hidden):
                state.kept.append(self._heads(hidden, state.reading).clone())
        else:
            for part in hidden.split(TILE):  # a head may be as wide as the vocabulary
                highest = self._heads(part, state.reading).amax(0)
                state.total = highest if state.total is None else torch.maximum(state.total, highest)


def _take_sum(state: _Row, hidden: Tensor, is_last: bool) -> None:
    """Add whole tiles to the sum, and at the end what is left; else that waits."""
    waiting = torch.cat([*state.kept, hidden]) if state.kept else hidden
    whole = waiting.shape[0] if is_last else waiting.shape[0] // TILE * TILE
    for tile in tile_sums(waiting[:whole]):
        state.total = tile if state.total is None else state.total + tile
    state.kept = [waiting[whole:].clone()] if whole < waiting.shape[0] else []


def _starts(step: Step) -> Sequence[int]:
    """Index of each row's first token; of a decode step, whose tokens need not have been planned, they are plain."""
    return range(len(step.plan.rows)) if step.shape.is_decode else step.tokens.starts


def _means(sums: Tensor, counts: list[int]) -> Tensor:
    return sums / upload(counts, sums.device)[:, None]


def _finished(values: Tensor, reading: _Reading) -> Tensor:
    return ACTIVATIONS[reading.activation](values[:, : reading.dimensions].contiguous())
