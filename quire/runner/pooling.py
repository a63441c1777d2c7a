"""Pooling: another result of a step. Hidden states of a prompt become a vector, chunk by chunk as it is computed.

A row's sums are over tiles of tokens at absolute positions, and a tile that a chunk leaves unfinished waits for the
next one: so a prompt computed in chunks gives the bits of one computed at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.ops.pooling import TILE, normalized, tile_sums
from quire.platform.transfer import Download
from quire.runner.step import PooledRows, Step
from quire.types.errors import EngineError
from quire.types.sampling import PoolingKind, PoolingParams
from quire.types.step import RowStart


class NoPooling:
    """Of an engine that generates."""

    def add_request(self, start: RowStart) -> None:
        if isinstance(start.params, PoolingParams):
            raise EngineError(f"request {start.request_id!r} wants a vector, but this engine generates tokens")

    def remove_request(self, row: int) -> None:
        """Forget the row; one that is not there does no harm."""
        return None

    def wants_every_token(self, rows: list[int]) -> bool:
        """Whether one of these rows reads more than the hidden state of its last token."""
        return False

    def read(self, step: Step) -> bool:
        """Take in the hidden states of a step whose forward pass was started; False if its rows sample instead."""
        return False


@dataclass(slots=True)
class _Row:
    kind: PoolingKind
    normalize: bool
    dimensions: int | None
    num_tokens: int = 0  # taken in so far
    total: Tensor | None = None  # [hidden] float32: sum of the whole tiles, or the one hidden state that counts
    kept: list[Tensor] = field(default_factory=list)  # [n, hidden] of the tile begun, or of all tokens


class Pooler(NoPooling):
    """Of an engine that pools."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    def add_request(self, start: RowStart) -> None:
        params = start.params
        if not isinstance(params, PoolingParams) or params.pooling is None:
            raise EngineError(f"request {start.request_id!r} does not say how to pool, and this engine only pools")
        normalize = params.use_activation is not False
        self._rows[start.row] = _Row(params.pooling, normalize, params.dimensions, start.num_computed_tokens)

    def remove_request(self, row: int) -> None:
        self._rows.pop(row, None)

    def wants_every_token(self, rows: list[int]) -> bool:
        return any(self._rows[row].kind != "last" for row in rows)

    @torch.inference_mode()
    def read(self, step: Step) -> bool:
        places = {index: place for place, index in enumerate(step.sample_indices)}
        starts = step.tokens.starts
        vectors: dict[tuple[int | None, bool], list[tuple[int, Tensor]]] = {}
        for index, (row, count) in enumerate(zip(step.plan.rows, step.plan.num_tokens, strict=True)):
            state, is_last = self._rows[row], index in places
            if state.kind == "last":
                if is_last:
                    assert step.hidden is not None
                    state.total = step.hidden[places[index]].float()
            else:
                assert step.every_hidden is not None
                _TAKE[state.kind](state, step.every_hidden[starts[index] : starts[index] + count], is_last)
            state.num_tokens += count
            if not is_last:
                continue
            if state.kind == "all":
                matrix = _finished(torch.cat(state.kept).float(), state.dimensions, state.normalize)
                step.pooled.append(PooledRows([index], Download(matrix), is_matrix=True))
            else:
                assert state.total is not None
                vector = state.total / state.num_tokens if state.kind == "mean" else state.total
                vectors.setdefault((state.dimensions, state.normalize), []).append((index, vector))
        for (dimensions, normalize), found in vectors.items():
            stacked = _finished(torch.stack([vector for _, vector in found]), dimensions, normalize)
            step.pooled.append(PooledRows([index for index, _ in found], Download(stacked)))
        return True


def _take_first(state: _Row, hidden: Tensor, is_last: bool) -> None:
    if state.num_tokens == 0:
        state.total = hidden[0].float()


def _take_sum(state: _Row, hidden: Tensor, is_last: bool) -> None:
    """Add whole tiles to the sum, and at the end what is left; else that waits."""
    waiting = torch.cat([*state.kept, hidden]) if state.kept else hidden
    whole = waiting.shape[0] if is_last else waiting.shape[0] // TILE * TILE
    for tile in tile_sums(waiting[:whole]):
        state.total = tile if state.total is None else state.total + tile
    state.kept = [waiting[whole:].clone()] if whole < waiting.shape[0] else []


def _take_all(state: _Row, hidden: Tensor, is_last: bool) -> None:
    state.kept.append(hidden.clone())


_TAKE = {"cls": _take_first, "mean": _take_sum, "all": _take_all}


def _finished(vectors: Tensor, dimensions: int | None, normalize: bool) -> Tensor:
    vectors = vectors[:, :dimensions].contiguous()
    return normalized(vectors) if normalize else vectors
