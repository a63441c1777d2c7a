"""LoRA: what an adapter adds to the result of a linear layer, for tokens that each have their own adapter or none."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.ops.base import Implementation, Op, native

AddLora = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, tuple[int, ...]], Tensor]


def add_lora(
    out: Tensor, x: Tensor, down: Tensor, up: Tensor, slots: Tensor, ranks: Tensor, widths: tuple[int, ...]
) -> Tensor:
    """out [n, N] += (x [n, K] @ down^T) @ up of each token's adapter, in place.

    down [slots, pieces, max_rank, K], up [slots, max_rank, N]: the outputs are pieces of these widths, each with its
    own `down`. slots [n] int32: a token's adapter, or -1, which leaves its line of `out` as it is. Of adapter s only
    the first ranks[s] lines count. Sums are float32, rounded once.
    """
    for slot in slots.unique().tolist():
        if slot < 0:
            continue
        tokens, rank = (slots == slot).nonzero().flatten(), int(ranks[slot])
        shrunk = torch.einsum("nk,prk->npr", x[tokens].float(), down[slot, :, :rank].float())
        parts = up[slot, :rank].float().split(widths, dim=1)
        added = torch.cat([shrunk[:, piece] @ part for piece, part in enumerate(parts)], dim=1)
        out[tokens] = (out[tokens].float() + added).to(out.dtype)
    return out


def generate_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    n, inner, rank, num_slots = 1 + 5 * (seed % 7), 16 * (1 + seed % 5) + seed % 3, 8 * (1 + seed % 2), 3
    widths = ((48,), (32, 16, 16), (40, 40))[seed % 3]

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    slots = torch.randint(-1, num_slots, (n,), generator=generator, dtype=torch.int32)
    slots[0] = 0
    ranks = torch.tensor([rank, 0, rank - 3], dtype=torch.int32)
    down, up = drawn(num_slots, len(widths), rank, inner), drawn(num_slots, rank, sum(widths))
    return drawn(n, sum(widths)), drawn(n, inner), down, up, slots, ranks, widths


ADD_LORA: Op[AddLora] = Op(
    "add_lora",
    add_lora,
    generate_inputs,
    1e-3,
    (native("add_lora", "lora"), Implementation("triton", "triton.lora:add_lora", ("cuda",))),
    changes=(0,),
)


def gather_adapters(row_slots: Tensor, rows: Tensor, starts: Tensor, size: int) -> Tensor:
    """[size] int32: the slot of each token of rows [r] int64, -1 past the last; token t of row rows[i] has
    starts[i] <= t < starts[i + 1]. row_slots [max_rows] int32."""
    tokens = torch.arange(size, dtype=torch.int32, device=rows.device)
    line = torch.searchsorted(starts, tokens, right=True) - 1
    found = row_slots[rows[line.clamp(max=len(rows) - 1)]]
    return torch.where(line < len(rows), found, -1)


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


def generate_tokens(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randint(-1, 3, (9,), generator=generator, dtype=torch.int32)
    return slots, torch.randint(9, (1 + seed % 6,), generator=generator)


GATHER_ADAPTERS: Op[Callable[[Tensor, Tensor, Tensor, int], Tensor]] = Op(
    "gather_adapters", gather_adapters, generate_rows, 0.0, (native("gather_adapters", "lora"),)
)
SELECT_ADAPTERS: Op[Callable[[Tensor, Tensor], Tensor]] = Op(
    "select_adapters", select_adapters, generate_tokens, 0.0, (native("select_adapters", "lora"),)
)
