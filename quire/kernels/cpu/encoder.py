"""What encoders do before and behind their layers, see quire/ops/encoder.py and quire/ops/encoder.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.cpu.library import bound
from quire.kernels.cpu.tracing import empty


def mark_second(index: Tensor, rows: Tensor, query_starts: Tensor, second: Tensor) -> Tensor:
    out = empty(index.shape[0], dtype=torch.int64)
    bound().mark_second(
        index.data_ptr(),
        rows.data_ptr(),
        query_starts.data_ptr(),
        second.data_ptr(),
        out.data_ptr(),
        rows.shape[0],
        index.shape[0],
    )
    return out


def positions_of(places: Tensor) -> Tensor:
    out = empty(places.shape[0], dtype=torch.int64)
    bound().positions_of(places.data_ptr(), out.data_ptr(), places.shape[0])
    return out


def add_places(x: Tensor, positions: Tensor | None, types: Tensor | None, places: Tensor, first: int) -> Tensor:
    x, places = x.contiguous(), places.contiguous()
    out = empty(*x.shape)
    bound().add_places(
        x.data_ptr(),
        None if positions is None else positions.data_ptr(),
        None if types is None else types.data_ptr(),
        places.data_ptr(),
        out.data_ptr(),
        *x.shape,
        first,
    )
    return out


def prompt_sums(hidden: Tensor, starts: Sequence[int], counts: Sequence[int]) -> Tensor:
    hidden = hidden.contiguous()
    where = torch.tensor([starts, counts], dtype=torch.int64)
    out = empty(len(starts), hidden.shape[1])
    bound().prompt_sums(hidden.data_ptr(), where[0].data_ptr(), where[1].data_ptr(), out.data_ptr(), *out.shape)
    return out
