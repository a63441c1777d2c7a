"""LoRA: what an adapter adds to the result of a linear layer, for tokens that each have their own adapter or none.

Once a step, tokens are sorted into tiles, each of one adapter. Then each layer shrinks its inputs to the adapter's
rank, before its matmul, and expands that into the matmul's result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.ops.base import Implementation, Op, native
from quire.ops.gated_linear import ACTIVATIONS
from quire.ops.split_k import linear_split_k

TILE = 16  # tokens, at most
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

ShrinkLora = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
LinearShrinking = Callable[
    [Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]
]
ExpandLora = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, tuple[int, ...]], Tensor]


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


def generate_slots(seed: int) -> tuple[Tensor, int]:
    generator = torch.Generator().manual_seed(seed)
    n, num_slots = (1, 7, 40, 33, 300)[seed % 5], 1 + seed % 4
    return torch.randint(-1, num_slots, (n,), generator=generator, dtype=torch.int32), num_slots


def _layer(seed: int) -> tuple[int, int, int, tuple[int, ...]]:
    """Tokens, inputs, rank and widths."""
    widths = ((48,), (32, 16, 16), (40, 40))[seed % 3]
    return 1 + 5 * (seed % 7), 16 * (1 + seed % 5) + seed % 3, 8 * (1 + seed % 2), widths


def generate_shrink_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every token has an adapter, and these have the highest rank: all of the result is defined."""
    generator = torch.Generator().manual_seed(seed)
    n, inner, rank, widths = _layer(seed)
    slots = torch.randint(3, (n,), generator=generator, dtype=torch.int32)
    down = torch.randn(3, len(widths), rank, inner, generator=generator)
    ranks = torch.full((3,), rank, dtype=torch.int32)
    return torch.randn(n, inner, generator=generator), down, tile_adapters(slots, 3), ranks


def generate_expand_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    n, _, rank, widths = _layer(seed)
    slots = torch.randint(-1, 3, (n,), generator=generator, dtype=torch.int32)
    slots[0] = 0
    out = torch.randn(n, sum(widths), generator=generator)
    shrunk = torch.randn(1, n, len(widths) * rank, generator=generator)
    up = torch.randn(3, rank, sum(widths), generator=generator)
    ranks = torch.tensor([rank, 0, rank - 3], dtype=torch.int32)
    return out, shrunk, up, tile_adapters(slots, 3), ranks, widths


def generate_gated_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, str]:
    out, shrunk, up, tiles, ranks, widths = generate_expand_inputs(3 * seed + 2)  # of two widths
    assert len(widths) == 2
    return out, shrunk, up, tiles, ranks, ("silu", "gelu_tanh")[seed % 2]


def generate_shrinking_inputs(
    seed: int,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, bool]:
    x, down, tiles, ranks = generate_shrink_inputs(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    weight = torch.randn(24 + seed % 5, x.shape[1], generator=generator)
    bias = torch.randn(len(weight), generator=generator) if seed % 2 else None
    slots = torch.full((len(x),), -1, dtype=torch.int32)
    for slot, tokens in _filled(tiles):
        slots[tokens] = slot
    return x, weight, bias, down, slots, tiles, ranks, bool(seed % 3)


def _triton(function: str, dtypes: tuple[torch.dtype, ...] = _FLOATS) -> Implementation:
    return Implementation("triton", f"triton.lora:{function}", ("cuda",), dtypes)


TILE_ADAPTERS: Op[Callable[[Tensor, int], Tensor]] = Op(
    "tile_adapters",
    tile_adapters,
    generate_slots,
    0.0,
    (native("tile_adapters", "lora"), _triton("tile_adapters", (torch.float32,))),
)
SHRINK_LORA: Op[ShrinkLora] = Op(
    "shrink_lora",
    shrink_lora,
    generate_shrink_inputs,
    1e-3,
    (native("shrink_lora", "lora"), _triton("shrink_lora")),
)
EXPAND_LORA: Op[ExpandLora] = Op(
    "expand_lora",
    expand_lora,
    generate_expand_inputs,
    1e-3,
    (native("expand_lora", "lora"), _triton("expand_lora")),
    changes=(0,),
)


EXPAND_LORA_GATED: Op[Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, str], Tensor]] = Op(
    "expand_lora_gated", expand_lora_gated, generate_gated_inputs, 1e-3, (_triton("expand_lora_gated"),)
)
LINEAR_SHRINKING: Op[LinearShrinking] = Op(
    "linear_shrinking",
    linear_shrinking,
    generate_shrinking_inputs,
    1e-3,
    (Implementation("triton", "triton.matmul:linear_shrinking", ("cuda",), varies=True),),
)


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


def generate_rows(seed: int) -> tuple[Tensor, Tensor, Tensor, int]:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 5, (1 + seed % 6,), generator=generator)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    rows = torch.randperm(9, generator=generator)[: len(counts)]
    row_slots = torch.randint(-1, 3, (9,), generator=generator, dtype=torch.int32)
    return row_slots, rows, starts, int(starts[-1]) + 1 + seed % 3


def generate_look_ups(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    count, rank, vocab = 1 + 3 * (seed % 5), 2 + seed % 7, 11 + seed % 9
    ids = torch.randint(vocab, (count,), generator=generator)
    slots = torch.randint(3, (count,), generator=generator, dtype=torch.int32)
    return ids, torch.randn(3, 1, rank, vocab, generator=generator), slots


def generate_picks(seed: int) -> tuple[Tensor, int, int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 7, (1 + 4 * (seed % 5),), generator=generator, dtype=torch.int32), seed % 4, 1 + seed % 3


def generate_tokens(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randint(-1, 3, (9,), generator=generator, dtype=torch.int32)
    return slots, torch.randint(9, (1 + seed % 6,), generator=generator)


GATHER_ADAPTERS: Op[Callable[[Tensor, Tensor, Tensor, int], Tensor]] = Op(
    "gather_adapters",
    gather_adapters,
    generate_rows,
    0.0,
    (native("gather_adapters", "lora"), _triton("gather_adapters", (torch.float32,))),
)
LOOK_UP_LORA: Op[Callable[[Tensor, Tensor, Tensor], Tensor]] = Op(
    "look_up_lora", look_up_lora, generate_look_ups, 0.0, (native("look_up_lora", "lora"),)
)
PICK_ADAPTERS: Op[Callable[[Tensor, int, int], Tensor]] = Op(
    "pick_adapters", pick_adapters, generate_picks, 0.0, (native("pick_adapters", "lora"),)
)
SELECT_ADAPTERS: Op[Callable[[Tensor, Tensor], Tensor]] = Op(
    "select_adapters", select_adapters, generate_tokens, 0.0, (native("select_adapters", "lora"),)
)
