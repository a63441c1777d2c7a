"""Inputs of the ops in quire/ops/lora.py."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.lora import _filled, tile_adapters


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


INPUTS = {
    "tile_adapters": generate_slots,
    "shrink_lora": generate_shrink_inputs,
    "expand_lora": generate_expand_inputs,
    "expand_lora_gated": generate_gated_inputs,
    "linear_shrinking": generate_shrinking_inputs,
    "gather_adapters": generate_rows,
    "look_up_lora": generate_look_ups,
    "pick_adapters": generate_picks,
    "select_adapters": generate_tokens,
}
