"""A token's place, as encoders read it: its position and, in the bits above, its token type."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import Op, native, triton

TYPE_SHIFT = 32
_POSITION = (1 << TYPE_SHIFT) - 1


def rows_of_tokens(rows: Tensor, query_starts: Tensor, num_tokens: int) -> Tensor:
    """[num_tokens] int64: the row of each token; of padding, the last one."""
    tokens = torch.arange(num_tokens, device=rows.device, dtype=query_starts.dtype)
    line = torch.searchsorted(query_starts[1:], tokens, right=True).clamp_(max=rows.shape[0] - 1)
    return rows[line]


def mark_second(index: Tensor, rows: Tensor, query_starts: Tensor, second: Tensor) -> Tensor:
    """Places [n] of tokens at index [n]: of type 1 from second[row] on, where the row's second text begins.

    rows [r] int64 and query_starts [r + 1] int32 say whose tokens they are; those behind are padding, of type 0.
    """
    row = rows_of_tokens(rows, query_starts, index.shape[0])
    is_token = torch.arange(index.shape[0], device=index.device) < query_starts[-1]
    return index + (((index >= second[row]) & is_token).long() << TYPE_SHIFT)


def positions_of(places: Tensor) -> Tensor:
    """Places [n] without their types."""
    return places & _POSITION


def add_places(x: Tensor, positions: Tensor | None, types: Tensor | None, places: Tensor, first: int) -> Tensor:
    """x [n, width] plus the row of each token's type, plus the row of its position; either table may be absent.

    positions [m, width], of which row `first` is that of position 0; types [k, width]; places [n] int64.
    """
    if types is not None:
        x = x + types.index_select(0, places >> TYPE_SHIFT)
    return x if positions is None else x + positions.index_select(0, (places & _POSITION) + first)


MARK_SECOND = Op("mark_second", mark_second, 0.0, (native("mark_second", "encoder"),))
ADD_PLACES = Op("add_places", add_places, 0.0, (triton("add_places", "encoder"), native("add_places", "encoder")))
POSITIONS_OF = Op("positions_of", positions_of, 0.0, (native("positions_of", "encoder"),))
