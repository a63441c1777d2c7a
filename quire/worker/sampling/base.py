"""What the sampling features share: the batch they see, the verbs they follow, and their per-row storage.

A feature keeps its parameters in device tensors indexed by row. It knows which rows use it, and a feature that
no row of the batch uses returns at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from quire.platform.transfer import refresh, upload
from quire.types.sampling import SamplingParams
from quire.types.step import RowStart


class RowState(Protocol):
    """What sampling reads of the worker's permanent rows."""

    @property
    def token_ids(self) -> Tensor: ...  # [max_rows, max_model_len] int32

    @property
    def num_tokens(self) -> Tensor: ...  # [max_rows] int64: known tokens, the prompt and the outputs so far

    @property
    def num_prompt_tokens(self) -> Tensor: ...  # [max_rows] int64

    @property
    def seeds(self) -> Tensor: ...  # [max_rows] int64


@dataclass
class SampleRows:
    """The rows that sample in this step, in batch order, on the device and on the host."""

    rows: Tensor  # [m] int64
    row_list: list[int]
    max_num_tokens: int | None = None
    """An upper bound of num_tokens over these rows, if the host knows one; it saves reading empty columns."""

    @cached_property
    def batch_index(self) -> Tensor:
        """[max(row_list) + 1] int64: where a row stands in the batch, -1 if nowhere."""
        index = torch.full((max(self.row_list) + 1,), -1, dtype=torch.int64, device=self.rows.device)
        index[self.rows] = torch.arange(len(self.row_list), device=self.rows.device)
        return index

    def index_of(self, rows: Tensor) -> Tensor:
        """[n] int64: the place of each of these rows in the batch, -1 for those that do not sample now."""
        last = self.batch_index.shape[0] - 1
        return torch.where(rows <= last, self.batch_index[rows.clamp(max=last)], -1)


@dataclass
class Selection:
    """Those rows of a batch that use a feature."""

    index: Tensor | None  # [a] int64 places in the batch; None when it is the whole batch
    batch: SampleRows
    places: list[int]  # the same on the host

    def take(self, values: Tensor) -> Tensor:
        """Their part of a batch tensor: the tensor itself when all are selected, a copy otherwise."""
        return values if self.index is None else values.index_select(0, self.index)

    def put(self, values: Tensor, part: Tensor) -> Tensor:
        """`values` with their part replaced; in place unless all are selected."""
        return part if self.index is None else values.index_copy_(0, self.index, part)


class ActiveRows:
    """A host-side set of rows that finds its members in a batch. Steady batches are looked up only once."""

    def __init__(self) -> None:
        self._rows: set[int] = set()
        self._seen: list[int] | None = None
        self._places: list[int] = []
        self._index: Tensor | None = None

    def add(self, row: int) -> None:
        self._rows.add(row)
        self._seen = None

    def discard(self, row: int) -> None:
        self._rows.discard(row)
        self._seen = None

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def select(self, rows: SampleRows) -> Selection | None:
        """None when no row of the batch is a member."""
        if not self._rows:
            return None
        if self._seen != rows.row_list:
            self._seen = list(rows.row_list)
            self._places = [place for place, row in enumerate(rows.row_list) if row in self._rows]
            partial = 0 < len(self._places) < len(rows.row_list)
            self._index = upload(self._places, rows.rows.device, torch.int64) if partial else None
        if not self._places:
            return None
        if self._index is None:
            return Selection(None, rows, self._places)
        members = [rows.row_list[place] for place in self._places]
        batch = SampleRows(rows.rows.index_select(0, self._index), members, rows.max_num_tokens)
        return Selection(self._index, batch, self._places)


class RowValues:
    """Numbers per row: written on the host, and copied to the device in one piece when some have changed."""

    def __init__(self, max_rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self._host = torch.zeros(columns, max_rows, dtype=dtype)
        self._device = torch.zeros(columns, max_rows, dtype=dtype, device=device)
        self._given: dict[int, tuple[float, ...]] = {}
        self._changed = False

    def set(self, row: int, *values: float) -> None:
        if self._given.get(row) == values:  # most requests ask for what the row's last one did
            return
        self._given[row] = values
        for column, value in enumerate(values):
            self._host[column, row] = value
        self._changed = True

    def flush(self) -> None:
        if self._changed:
            refresh(self._device, self._host)
            self._changed = False

    @property
    def all(self) -> Tensor:
        """[columns, max_rows], where every flush leaves them."""
        return self._device

    def get(self, rows: Tensor) -> Tensor:
        """[columns, m]"""
        return self._device.index_select(1, rows)


class RowLists:
    """A list of records per row, kept on the device as one table of (row, record) lines."""

    def __init__(self, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self._columns = columns
        self._dtype = dtype
        self._lists: dict[int, Tensor] = {}
        self._changed = False
        self._none = torch.zeros(0, columns + 1, dtype=dtype)
        self.table = self._none.to(device)

    def set(self, row: int, records: Sequence[Sequence[float]]) -> None:
        values = torch.tensor(records, dtype=self._dtype).view(-1, self._columns)
        self._lists[row] = torch.cat([torch.full((len(records), 1), row, dtype=self._dtype), values], dim=1)
        self._changed = True

    def clear(self, row: int) -> None:
        if self._lists.pop(row, None) is not None:
            self._changed = True

    def flush(self) -> None:
        if self._changed:
            lines = torch.cat(list(self._lists.values())) if self._lists else self._none
            self.table = torch.empty(lines.shape, dtype=self._dtype, device=self.table.device)
            refresh(self.table, lines)
            self._changed = False


class Feature(ABC):
    """One way to change logits."""

    @abstractmethod
    def add_request(self, row: int, start: RowStart) -> None:
        """Stage the parameters of a request that takes this row. Host only."""

    @abstractmethod
    def remove_request(self, row: int) -> None:
        """Forget the row. Host only; removing a row that is not there does nothing."""

    @abstractmethod
    def apply_staged_writes(self) -> None:
        """Copy what was staged to the device, in one piece; does nothing when nothing was."""

    @abstractmethod
    def apply(self, logits: Tensor, rows: SampleRows, state: RowState) -> Tensor:
        """Change the logits [m, vocab_size] float32, in place where possible, and return them. No sync.

        What it does to a row depends on that row only.
        """


def sampling_params(start: RowStart) -> SamplingParams:
    assert isinstance(start.params, SamplingParams), "a pooling row is never sampled"
    return start.params


def add_to_entries(logits: Tensor, places: Tensor, token_ids: Tensor, values: Tensor) -> Tensor:
    """logits[places[i], token_ids[i]] += values[i], skipping entries whose place is -1. Adding -inf bans."""
    present = places >= 0
    values = torch.where(present, values, 0.0)
    return logits.index_put_((places.clamp(min=0), token_ids), values, accumulate=True)


def output_lengths(rows: Tensor, state: RowState) -> Tensor:
    """[m] int64: how many tokens each row has generated, which is the position of the one to be drawn."""
    return state.num_tokens.index_select(0, rows) - state.num_prompt_tokens.index_select(0, rows)
