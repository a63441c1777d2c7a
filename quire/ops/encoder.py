"""What encoders compute besides attention: places of tokens, and pooling of hidden states into vectors.

A token's place is its position and, in the bits above, its token type. A reduction of torch may add in another order
when the batch has another shape. Here a sum is a tree of elementwise additions, so that a vector's bits depend on its
prompt and on nothing that ran beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.ops.activation import relu, sigmoid
from quire.ops.base import Op, native, triton
from quire.platform.transfer import upload
from quire.types.sampling import Activation

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


MARK_SECOND = Op(mark_second, 0.0, native("encoder"))
ADD_PLACES = Op(add_places, 0.0, triton("encoder"), native("encoder"))
POSITIONS_OF = Op(positions_of, 0.0, native("encoder"))


TILE = 64  # tokens of a partial sum, at absolute positions
_SMALLEST_NORM = 1e-12


def tree_sum(values: Tensor, dim: int) -> Tensor:
    """The sum over a dimension: halves are added to each other until one is left."""
    size = values.shape[dim]
    whole = 1 << max(0, size - 1).bit_length()
    if whole != size:
        padding = list(values.shape)
        padding[dim] = whole - size
        values = torch.cat((values, values.new_zeros(padding)), dim)
    while whole > 1:
        whole //= 2
        values = values.narrow(dim, 0, whole) + values.narrow(dim, whole, whole)
    return values.squeeze(dim)


def tile_sums(hidden: Tensor) -> Tensor:
    """[n, size] -> [tiles, size] float32: sums of TILE rows each; the last tile may have fewer."""
    missing = -hidden.shape[0] % TILE
    padded = torch.nn.functional.pad(hidden.float(), (0, 0, 0, missing))
    return tree_sum(padded.view(-1, TILE, hidden.shape[1]), 1)


def prompt_sums(hidden: Tensor, starts: Sequence[int], counts: Sequence[int]) -> Tensor:
    """[n, size] -> [prompts, size] float32: the sum of each prompt's tokens, which are counts[i] from starts[i] on.

    Tiles are summed and added one after the other, as they are of a prompt that comes in chunks.
    """
    tiles = np.array([-(-count // TILE) for count in counts])
    first = np.concatenate(([0], tiles.cumsum()))
    index = np.full((int(first[-1]), TILE), hidden.shape[0])  # of a line of zeros
    flat = index.reshape(-1)
    for at, start, count in zip(first, starts, counts, strict=False):
        flat[at * TILE : at * TILE + count] = np.arange(start, start + count)
    padded = torch.nn.functional.pad(hidden.float(), (0, 0, 0, 1))
    lines = upload(flat.tolist(), hidden.device, torch.int64)
    sums = tree_sum(padded.index_select(0, lines).view(*index.shape, hidden.shape[1]), 1)
    total = sums.index_select(0, upload(first[:-1].tolist(), hidden.device, torch.int64))
    for tile in range(1, int(tiles.max())):
        (longer,) = np.nonzero(tiles > tile)
        rows = upload(longer.tolist(), hidden.device, torch.int64)
        more = upload((first[longer] + tile).tolist(), hidden.device, torch.int64)
        total[rows] = total[rows] + sums.index_select(0, more)
    return total


PROMPT_SUMS = Op(prompt_sums, 0.0, triton("encoder"), native("encoder"))


def normalized(vectors: Tensor) -> Tensor:
    """[m, size] float32, each divided by its length; a vector of zeros stays one."""
    lengths = tree_sum(vectors * vectors, 1).sqrt_().clamp_min_(_SMALLEST_NORM)
    return vectors / lengths[:, None]


def softmax(logits: Tensor) -> Tensor:
    """[m, classes] float32 -> probabilities of each row."""
    weights = (logits - logits.amax(1, keepdim=True)).exp_()
    return weights / tree_sum(weights, 1)[:, None]


def log1p_relu(values: Tensor) -> Tensor:
    """log(1 + max(x, 0)), as sparse encoders weigh tokens."""
    return relu(values).add_(1.0).log_()


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "none": lambda values: values,
    "normalize": normalized,
    "sigmoid": sigmoid,
    "softmax": softmax,
    "relu": relu,
    "log1p_relu": log1p_relu,
}
