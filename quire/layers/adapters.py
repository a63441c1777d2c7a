"""LoRA adapters on linear layers: slots at fixed addresses, and what each adds to the tokens that have it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.layers.fusion import Passed, whole
from quire.ops.base import Target
from quire.ops.lora import EXPAND_LORA, GATHER_ADAPTERS, SELECT_ADAPTERS, SHRINK_LORA, TILE_ADAPTERS
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


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """What goes into a slot of one layer."""

    down: Tensor  # [pieces, max_rank, inputs]
    up: Tensor  # [max_rank, outputs]
    rank: int


class AdapterTokens:
    """Which adapter each token has that layers compute now. One object, which all layers of a model look at.

    While `tiles` is None layers are as without adapters; a step in which some row has one sets it.
    """

    def __init__(self, sizes: AdapterSizes, max_rows: int, device: torch.device) -> None:
        self.sizes = sizes
        target = Target(device.type)
        self.row_slots = torch.full((max_rows + 1,), -1, dtype=torch.int32, device=device)
        self.tiles: Tensor | None = None  # tokens by adapter, see ops/lora.py
        self._slots: Tensor | None = None  # [n] int32
        self._gather, self._select = GATHER_ADAPTERS.bind(target), SELECT_ADAPTERS.bind(target)
        self._tile = TILE_ADAPTERS.bind(target)

    @contextmanager
    def of_tokens(self, rows: Tensor, starts: Tensor, num_tokens: int) -> Iterator[None]:
        """While the tokens of a step, of these rows, are computed."""
        self._slots = self._gather(self.row_slots, rows, starts, num_tokens)
        self.tiles = self._tile(self._slots, self.sizes.num_slots)
        try:
            yield
        finally:
            self._slots = self.tiles = None

    def narrow(self, tokens: Tensor) -> None:
        """From here on only these of them are."""
        if self._slots is not None:
            self._slots = self._select(self._slots, tokens)
            self.tiles = self._tile(self._slots, self.sizes.num_slots)

    @contextmanager
    def narrowing_for_now(self) -> Iterator[None]:
        """Tokens that are narrowed inside the context are all computed again after it."""
        before = self._slots, self.tiles
        yield
        self._slots, self.tiles = before


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
        self._shrink, self._expand = SHRINK_LORA.bind(target), EXPAND_LORA.bind(target)
        self.tokens: AdapterTokens | None = None  # set once, when rows are made

    @property
    def is_active(self) -> bool:
        return self.tokens is not None and self.tokens.tiles is not None

    def shrink(self, x: Passed) -> Tensor | None:
        """What `expand` takes, of the layer's input; None where no token has an adapter. To be called before the
        layer's matmul, beside which it runs."""
        if self.tokens is None or self.tokens.tiles is None:
            return None
        return self._shrink(whole(x), self.down, self.tokens.tiles, self.ranks)

    def expand(self, out: Passed, shrunk: Tensor | None) -> Passed:
        """`out`, the layer's result, with what the tokens' adapters add. Changes it in place."""
        if self.tokens is None or self.tokens.tiles is None or shrunk is None:
            return out
        changed = out.values[0] if isinstance(out, PartialSums) else whole(out)
        self._expand(changed, shrunk, self.up, self.tokens.tiles, self.ranks, self.widths)
        return out if isinstance(out, PartialSums) else changed

    def pack(self, pairs: Mapping[int, LoraPair]) -> PackedAdapter:
        """As a slot has it, in host memory: piece -> what is added to it; to the others nothing is."""
        rank = max(len(pair.down) for pair in pairs.values())
        down = torch.zeros(self.down.shape[1:], dtype=self.down.dtype, device="cpu")
        up = torch.zeros(self.up.shape[1:], dtype=self.up.dtype, device="cpu")
        column = 0
        for piece, width in enumerate(self.widths):
            if piece in pairs:
                pair = pairs[piece]
                down[piece, : len(pair.down)] = pair.down
                up[: len(pair.up), column : column + width] = pair.up
            column += width
        if self.down.device.type != "cpu":  # so that copies to the device need not wait for one another
            down, up = down.pin_memory(), up.pin_memory()
        return PackedAdapter(down, up, rank)

    def load(self, slot: int, packed: PackedAdapter | None) -> None:
        """Fill a slot; None: with nothing, whose rank is 0. Does not wait."""
        self.ranks[slot] = 0 if packed is None else packed.rank
        if packed is not None:
            self.down[slot].copy_(packed.down, non_blocking=True)
            self.up[slot].copy_(packed.up, non_blocking=True)
