"""LoRA adapters on experts: each token's adapter has matrices for each of its experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quire.layers.adapters import AdapterSizes, AdapterSlots, LinearAdapters, LoraPair, PackedAdapter, TokenTiles
from quire.ops.base import Target
from quire.ops.lora import TILE_ADAPTERS


class ExpertAdapters(LinearAdapters):
    """The slots of a grouped layer. A slot is one for each expert, and a row one of the experts of a token."""

    def __init__(
        self, num_experts: int, inner: int, widths: Sequence[int], sizes: AdapterSizes, target: Target
    ) -> None:
        super().__init__(inner, widths, sizes.times(num_experts), target)
        self.num_experts, self._tile = num_experts, TILE_ADAPTERS.bind(target)
        self._pairs: list[TokenTiles] = []

    def rows_of(self, expert_ids: Tensor) -> list[TokenTiles]:
        """The adapters of rows, of expert_ids [n, k] int32; experts of other ranks have none."""
        assert self.tokens is not None
        found = []
        for slots, now in zip(self._slots(), self.tokens.now, strict=True):
            token_slots = now.slots.unsqueeze(1)
            is_here = (token_slots >= 0) & (expert_ids < self.num_experts)
            rows = torch.where(is_here, token_slots * self.num_experts + expert_ids, -1).flatten().to(torch.int32)
            found.append(TokenTiles(rows, self._tile(rows, len(slots.ranks))))
        return found

    def add(self, out: Tensor, rows: Tensor, tiles: list[TokenTiles]) -> Tensor:
        """out [n * k, outputs] with what adapters add for rows [n * k, inputs]. Changes it in place."""
        self._pairs = tiles
        self.expand(out, self.shrink(rows))
        return out

    def _now(self) -> list[tuple[AdapterSlots, TokenTiles]]:
        return list(zip(self._slots(), self._pairs, strict=True))

    def pack(self, pairs: Mapping[int, LoraPair], rank: int | None = None) -> PackedAdapter:
        """pairs by expert * pieces + piece."""
        pieces = len(self.widths)
        rank = rank or max(len(pair.down) for pair in pairs.values())
        packed = []
        for expert in range(self.num_experts):
            mine = {piece: pairs[key] for piece in range(pieces) if (key := expert * pieces + piece) in pairs}
            packed.append(super().pack(mine, rank))
        return PackedAdapter(torch.cat([each.down for each in packed]), torch.cat([each.up for each in packed]), rank)

    def load(self, slot: int, packed: PackedAdapter | None) -> None:
        for expert in range(self.num_experts):
            one = None
            if packed is not None:
                lines = slice(expert * packed.rank, (expert + 1) * packed.rank)
                pieces = slice(expert * len(self.widths), (expert + 1) * len(self.widths))
                one = PackedAdapter(packed.down[pieces], packed.up[lines], packed.rank)
            super().load(slot * self.num_experts + expert, one)
