"""A token's place, as encoders read it: its position and, in the bits above, its token type."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import Implementation, Op, native

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


def generate_rows(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 6, (1 + seed % 4,), generator=generator)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int()
    index = torch.cat([torch.arange(int(count)) for count in counts] + [torch.zeros(seed % 3, dtype=torch.int64)])
    second = torch.randint(0, 7, (9,), generator=generator)
    return index, torch.randperm(9, generator=generator)[: len(counts)], starts, second


def generate_marked(seed: int) -> tuple[Tensor]:
    return (mark_second(*generate_rows(seed)),)


def generate_places(seed: int) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, int]:
    generator = torch.Generator().manual_seed(seed)
    width, first = 1 + 7 * seed, seed % 3
    x, positions, types = (torch.randn(count, width, generator=generator) for count in (5, 9 + first, 2))
    places = torch.randint(9, (5,), generator=generator)
    if seed % 4 == 0:
        return x, positions, None, places, first
    marked = places + (torch.randint(2, (5,), generator=generator) << TYPE_SHIFT)
    return x, None if seed % 4 == 1 else positions, types, marked, first


MARK_SECOND = Op("mark_second", mark_second, generate_rows, 0.0, (native("mark_second", "encoder"),))
ADD_PLACES = Op(
    "add_places",
    add_places,
    generate_places,
    0.0,
    (Implementation("triton", "triton.encoder:add_places", ("cuda",)), native("add_places", "encoder")),
)
POSITIONS_OF = Op("positions_of", positions_of, generate_marked, 0.0, (native("positions_of", "encoder"),))
