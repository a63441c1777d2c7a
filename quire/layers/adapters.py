"""LoRA adapters on linear layers: slots at fixed addresses, and what each adds to the tokens that have it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.layers.fusion import Passed, whole
from quire.ops.base import Target
from quire.ops.lora import ADD_LORA, GATHER_ADAPTERS, SELECT_ADAPTERS
from quire.ops.split_k import PartialSums


@dataclass(frozen=True, slots=True)
class AdapterSizes:
    num_slots: int  # adapters that are resident
    max_rank: int


@dataclass(frozen=True, slots=True)
class LoraPair:
    """What an adapter adds to one matrix of a checkpoint: x @ down^T @ up, its scale in `up`."""

    down: Tensor  # [rank, inputs]
    up: Tensor  # [rank, outputs]


class AdapterTokens:
    """Which adapter each token has that layers compute now. One object, which all layers of a model look at.

    While `slots` is None layers are as without adapters; a step in which some row has one sets it.
    """

    def __init__(self, sizes: AdapterSizes, max_rows: int, device: torch.device) -> None:
        self.sizes = sizes
        target = Target(device.type)
        self.row_slots = torch.full((max_rows + 1,), -1, dtype=torch.int32, device=device)
        self.slots: Tensor | None = None  # [n] int32
        self._gather, self._select = GATHER_ADAPTERS.bind(target), SELECT_ADAPTERS.bind(target)

    @contextmanager
    def of_tokens(self, rows: Tensor, starts: Tensor, num_tokens: int) -> Iterator[None]:
        """While the tokens of a step, of these rows, are computed."""
        self.slots = self._gather(self.row_slots, rows, starts, num_tokens)
        try:
            yield
        finally:
            self.slots = None

    def narrow(self, tokens: Tensor) -> None:
        """From here on only these of them are."""
        if self.slots is not None:
            self.slots = self._select(self.slots, tokens)


class LinearAdapters(nn.Module):
    """The slots of one linear layer, whose outputs are pieces of these widths."""

    down: Tensor
    up: Tensor
    ranks: Tensor

    def __init__(self, inner: int, widths: Sequence[int], sizes: AdapterSizes, target: Target) -> None:
        super().__init__()
        self.widths = tuple(widths)
        rank = 1 << (max(16, sizes.max_rank) - 1).bit_length() if target.platform == "cuda" else sizes.max_rank
        down = torch.zeros(sizes.num_slots, len(self.widths), rank, inner, dtype=target.dtype)
        self.register_buffer("down", down, persistent=False)
        up = torch.zeros(sizes.num_slots, rank, sum(self.widths), dtype=target.dtype)
        self.register_buffer("up", up, persistent=False)
        self.register_buffer("ranks", torch.zeros(sizes.num_slots, dtype=torch.int32), persistent=False)
        self._add = ADD_LORA.bind(target)
        self.tokens: AdapterTokens | None = None  # set once, when rows are made

    @property
    def is_active(self) -> bool:
        return self.tokens is not None and self.tokens.slots is not None

    def add(self, out: Passed, x: Passed) -> Passed:
        """`out`, the layer's result for x, with what the tokens' adapters add. Changes it in place."""
        if self.tokens is None or self.tokens.slots is None:
            return out
        changed = out.values[0] if isinstance(out, PartialSums) else whole(out)
        self._add(changed, whole(x), self.down, self.up, self.tokens.slots, self.ranks, self.widths)
        return out if isinstance(out, PartialSums) else changed

    def load(self, slot: int, pairs: Mapping[int, LoraPair]) -> None:
        """Fill a slot: piece -> what is added to it; to the others nothing is."""
        rank = max((len(pair.down) for pair in pairs.values()), default=0)
        self.ranks[slot] = rank
        self.down[slot].zero_()
        self.up[slot].zero_()
        column = 0
        for piece, width in enumerate(self.widths):
            if piece in pairs:
                pair = pairs[piece]
                self.down[slot, piece, : len(pair.down)] = pair.down.to(self.down)
                self.up[slot, : len(pair.up), column : column + width] = pair.up.to(self.up)
            column += width
