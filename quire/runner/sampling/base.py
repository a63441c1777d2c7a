"""What sampling features share: the rows they read, the verbs they follow, and their per-row tables.

A feature keeps its parameters in device tensors indexed by row, written on the host when a request takes a row. Its
op reads them there, so that eager and captured steps run the same list of ops.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from quire.platform.transfer import refresh
from quire.types.sampling import SamplingParams
from quire.types.step import RowStart


class RowState(Protocol):
    """What sampling reads of the permanent rows, and where it appends tokens."""

    scratch_row: int  # belongs to no request
    token_ids: Tensor  # [max_rows, max_model_len] int32
    num_tokens: Tensor  # [max_rows] int64: known tokens, the prompt and the outputs so far
    num_prompt_tokens: Tensor  # [max_rows] int64
    num_computed: Tensor  # [max_rows] int64
    seeds: Tensor  # [max_rows] int64


class RowValues:
    """Numbers per row: written on the host, and copied to the device in one piece when some have changed."""

    def __init__(self, max_rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self._host = torch.zeros(columns, max_rows, dtype=dtype)
        self.all = torch.zeros(columns, max_rows, dtype=dtype, device=device)
        """Always the same tensor."""
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
            refresh(self.all, self._host)
            self._changed = False


class Feature(ABC):
    """One way to change logits before a token is chosen."""

    name: str
    group: str = "shaping"
    """Features of one group are captured together: where a row asks for one of them, all of the group run."""
    capturable: bool = True
    """Whether `apply` only calls kernels of the device, so that it can be captured; else its steps run eagerly."""

    @abstractmethod
    def add_request(self, row: int, start: RowStart) -> bool:
        """Stage the parameters of a request that takes this row, and say whether it asks for this. Host only."""

    def remove_request(self, row: int) -> None:
        """Forget the row. Host only; removing a row that is not there does nothing."""
        return None

    def apply_staged_writes(self) -> None:
        """Copy what was staged to the device, in one piece; does nothing when nothing was."""
        return None

    @abstractmethod
    def apply(self, logits: Tensor, rows: Tensor, state: RowState, ahead: Tensor | None = None) -> None:
        """Change logits [m, vocab_size] float32 of rows [m] int64 in place. No sync.

        With drafts a row comes several times: ahead [m] int32 drafts behind its known tokens count as known there.
        What it does to a row depends on that row only; rows that do not ask for it stay as they are.
        """

    def error_of(self, row: int, place: int) -> str | None:
        """Why the row can have no token at this place of the batch, if this feature failed for it.

        Asked after `apply`, of eager steps only.
        """
        return None

    def is_oversized(self, row: int) -> bool:
        """Whether the row asks for more than the tables that captured steps read can hold."""
        return False


def sampling_params(start: RowStart) -> SamplingParams:
    assert isinstance(start.params, SamplingParams), "a pooling row is never sampled"
    return start.params
