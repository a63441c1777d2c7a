"""LoRA: what an adapter adds to the result of a linear layer, for tokens that each have their own adapter or none.

Once a step, tokens are sorted into tiles, each of one adapter. Then each layer shrinks its inputs to the adapter's
rank, before its matmul, and expands that into the matmul's result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import F32, Op, native, triton
from quire.ops.gated_linear import ACTIVATIONS
from quire.ops.split_k import linear_split_k

TILE = 16  # tokens, at most


def tile_adapters(slots: Tensor, num_slots: int) -> Tensor:
    """[n, 1 + TILE] int32: the tokens of slots [n] int32 (-1: no adapter) in tiles, by slot and then by token.

    A line is the slot and then its tokens, with -1 for a token or a tile that there is not. Tokens without an adapter
    come last, in tiles whose slot is -1.
    """
    lines = [
        [slot, *tokens, *[-1] * (TILE - len(tokens))]
        for slot in (*range(num_slots), -1)
        for tokens in (slots == slot).nonzero().flatten().split(TILE)
        if len(tokens)
    ]
    tiles = torch.full((len(slots), 1 + TILE), -1, dtype=torch.int32)
    tiles[: len(lines)] = torch.tensor(lines, dtype=torch.int32).view(-1, 1 + TILE)
    return tiles.to(slots.device)


def shrink_lora(x: Tensor, down: Tensor, tiles: Tensor, ranks: Tensor) -> Tensor:
    """x [n, K] @ down^T of each token's adapter, as partial sums [parts, n, pieces * max_rank] float32.

    down [slots, pieces, max_rank, K]: the outputs of the layer are pieces, each with its own `down`; ranks [slots].
    Undefined for tokens without an adapter, and beyond an adapter's rank. One part or more; see `sum_of`.
    """
    shrunk = x.new_zeros(1, len(x), down.shape[1] * down.shape[2], dtype=torch.float32)
    for slot, tokens in _filled(tiles):
        lines = down[slot].flatten(0, 1).float()
        shrunk[0, tokens] = x[tokens].float() @ lines.T
    return shrunk


def expand_lora(
    out: Tensor, shrunk: Tensor, up: Tensor, tiles: Tensor, ranks: Tensor, widths: tuple[int, ...]
) -> Tensor:
    """out [n, N] += what `shrink_lora` gave times `up` of each token's adapter, in place; other lines stay.

    up [slots, max_rank, N], N being pieces of these widths. Of adapter s only the first ranks[s] lines count. Sums
    are float32, rounded once.
    """
    found = shrunk.sum(0).view(len(out), len(widths), -1)
    for slot, tokens in _filled(tiles):
        rank = int(ranks[slot])
        parts = up[slot, :rank].float().split(widths, dim=1)
        added = torch.cat([found[tokens, piece, :rank] @ part for piece, part in enumerate(parts)], dim=1)
        out[tokens] = (out[tokens].float() + added).to(out.dtype)
    return out


def expand_lora_gated(
    out: Tensor, shrunk: Tensor, up: Tensor, tiles: Tensor, ranks: Tensor, activation: str
) -> Tensor:
    """`expand_lora` into out [n, 2 * N], gates and what they gate, and the activation after it: [n, N]."""
    width = out.shape[1] // 2
    return ACTIVATIONS[activation](expand_lora(out.clone(), shrunk, up, tiles, ranks, (width, width)))


def linear_shrinking(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    slots: Tensor,
    tiles: Tensor,
    ranks: Tensor,
    in_parts: bool,
) -> tuple[Tensor, Tensor]:
    """x @ weight.T + bias as `linear_split_k` gives it, and what `shrink_lora` makes of x.

    slots [n]: of which the tiles are. Without `in_parts` the matmul is whole, [1, n, N] in x's type.
    """
    return linear_split_k(x, weight, bias), shrink_lora(x, down, tiles, ranks)


def _filled(tiles: Tensor) -> list[tuple[int, Tensor]]:
    """Slot and tokens of each tile."""
    filled = tiles[tiles[:, 0] >= 0].long()
    return [(int(line[0]), line[1:][line[1:] >= 0]) for line in filled]


TILE_ADAPTERS = Op(tile_adapters, 0.0, native("lora"), triton("lora", F32))
SHRINK_LORA = Op(shrink_lora, 1e-3, native("lora"), triton("lora"))
EXPAND_LORA = Op(expand_lora, 1e-3, native("lora"), triton("lora"), changes=(0,))


EXPAND_LORA_GATED = Op(expand_lora_gated, 1e-3, native("lora"), triton("lora"))
LINEAR_SHRINKING = Op(linear_shrinking, 1e-3, triton("matmul", varies=True))


def gather_adapters(row_slots: Tensor, rows: Tensor, starts: Tensor, size: int) -> Tensor:
    """[size] int32: the slot of each token of rows [r] int64, -1 past the last; token t of row rows[i] has
    starts[i] <= t < starts[i + 1]. row_slots [max_rows] int32."""
    tokens = torch.arange(size, dtype=torch.int32, device=rows.device)
    line = torch.searchsorted(starts, tokens, right=True) - 1
    found = row_slots[rows[line.clamp(max=len(rows) - 1)]]
    return torch.where(line < len(rows), found, -1)


def pick_adapters(slots: Tensor, first: int, count: int) -> Tensor:
    """slots [n] int32 as numbers within `count` slots from `first` on; -1 for all others."""
    return torch.where((slots >= first) & (slots < first + count), slots - first, -1)


def look_up_lora(token_ids: Tensor, down: Tensor, slots: Tensor) -> Tensor:
    """What `shrink_lora` gives of one-hot inputs: columns of token_ids [n] int64, as [1, n, max_rank] float32.

    down [slots, 1, max_rank, tokens], slots [n] int32; undefined for tokens without an adapter.
    """
    return down[slots.clamp(min=0).long(), 0, :, token_ids].float().unsqueeze(0)


def select_adapters(slots: Tensor, tokens: Tensor) -> Tensor:
    """slots[tokens], of tokens [m] int64."""
    return slots[tokens]


GATHER_ADAPTERS = Op(gather_adapters, 0.0, native("lora"), triton("lora", F32))
LOOK_UP_LORA = Op(look_up_lora, 0.0, native("lora"))
PICK_ADAPTERS = Op(pick_adapters, 0.0, native("lora"))
SELECT_ADAPTERS = Op(select_adapters, 0.0, native("lora"))
