"""LoRA adapters on linear layers and on experts: slots at fixed addresses, and what each adds to its tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quire.layers.fusion import Passed, whole
from quire.layers.quant.base import Shrinking
from quire.ops.base import Target
from quire.ops.lora import (
    EXPAND_LORA,
    EXPAND_LORA_GATED,
    GATHER_ADAPTERS,
    LOOK_UP_LORA,
    PICK_ADAPTERS,
    SELECT_ADAPTERS,
    SHRINK_LORA,
    TILE_ADAPTERS,
)
from quire.ops.split_k import PartialSums
from quire.types.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AdapterSizes:
    """Slots are numbered from the first bucket to the last."""

    buckets: tuple[tuple[int, int], ...]  # (rank, slots of it), the lowest rank first
    on_experts: bool = False
    dtype: str = "auto"  # a setting: lora_dtype

    @property
    def max_rank(self) -> int:
        return self.buckets[-1][0]

    def times(self, count: int) -> AdapterSizes:
        """With as many slots for each of them."""
        return replace(self, buckets=tuple((rank, slots * count) for rank, slots in self.buckets))

    def dtype_on(self, target: Target) -> torch.dtype:
        """What slots keep adapters in. ConfigError if lora_dtype is not for this platform."""
        if target.platform == "cpu":
            return torch.float32 if self.dtype == "float32" else torch.float16
        if self.dtype not in ("auto", str(target.dtype).removeprefix("torch.")):
            raise ConfigError(f"lora_dtype is {self.dtype} but adapters on {target.platform} have --dtype; use auto")
        return target.dtype


@dataclass(frozen=True, slots=True)
class LoraPair:
    """What an adapter adds to one matrix of a checkpoint: x @ down^T @ up, its scale in `up`."""

    down: Tensor  # [rank, inputs]
    up: Tensor  # [rank, outputs]


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """What goes into a slot of one layer."""

    down: Tensor  # [pieces, rank, inputs]
    up: Tensor  # [rank, outputs]
    rank: int


class TokenTiles(NamedTuple):
    """The adapters of one bucket that the tokens have which are computed."""

    slots: Tensor  # [n] int32
    tiles: Tensor  # tokens by adapter, see ops/lora.py


class AdapterTokens:
    """Which adapter each token has that layers compute now. One object, which all layers of a model look at.

    While `now` is empty layers are as without adapters; a step in which some row has one sets it.
    """

    def __init__(self, sizes: AdapterSizes, max_rows: int, device: torch.device) -> None:
        self.sizes = sizes
        target = Target(device.type)
        self.row_slots = torch.full((max_rows + 1,), -1, dtype=torch.int32, device=device)
        self.now: list[TokenTiles] = []  # by bucket
        self._gather, self._select = GATHER_ADAPTERS.bind(target), SELECT_ADAPTERS.bind(target)
        self._tile, self._pick = TILE_ADAPTERS.bind(target), PICK_ADAPTERS.bind(target)
        self._slots: Tensor | None = None  # [n] int32, of all buckets

    def of_tokens(self, rows: Tensor, starts: Tensor, num_tokens: int) -> AbstractContextManager[None]:
        """While the tokens of a step, of these rows, are computed."""
        return self._while(self._gather(self.row_slots, rows, starts, num_tokens))

    def of_samples(self, rows: Tensor, size: int | None = None) -> AbstractContextManager[None]:
        """While logits of these rows [m] int64 are computed, padded to `size`."""
        slots = self._select(self.row_slots, rows)
        if size is not None and size > len(rows):
            slots = torch.nn.functional.pad(slots, (0, size - len(rows)), value=-1)
        return self._while(slots)

    @contextmanager
    def _while(self, slots: Tensor) -> Iterator[None]:
        self._set(slots)
        try:
            yield
        finally:
            self._slots, self.now = None, []

    def narrow(self, tokens: Tensor) -> None:
        """From here on only these of them are."""
        if self._slots is not None:
            self._set(self._select(self._slots, tokens))

    @contextmanager
    def narrowing_for_now(self) -> Iterator[None]:
        """Tokens that are narrowed inside the context are all computed again after it."""
        before = self._slots, self.now
        yield
        self._slots, self.now = before

    def _set(self, slots: Tensor) -> None:
        self._slots, self.now, first = slots, [], 0
        for _, count in self.sizes.buckets:
            mine = slots if len(self.sizes.buckets) == 1 else self._pick(slots, first, count)
            self.now.append(TokenTiles(mine, self._tile(mine, count)))
            first += count


class Adaptable(nn.Module, ABC):
    """A layer that adapters may be on."""

    adapters: LinearAdapters | None  # None: it has no slots
    num_matrices: int = 1  # of each piece: one for each expert

    def takes(self, sizes: AdapterSizes) -> bool:
        return True

    @abstractmethod
    def adapt(self, sizes: AdapterSizes) -> None:
        """Make room for adapters on this layer."""

    @abstractmethod
    def adapter_shape(self, piece: str | None) -> tuple[int, int] | None:
        """(outputs, inputs) of a matrix that a checkpoint has for this layer; None: it has no such matrix."""

    @abstractmethod
    def adapter_parts(self, piece: str | None, pair: LoraPair) -> dict[int, LoraPair]:
        """Of an adapter on a checkpoint's matrix, what this rank holds, by the index of its piece here."""


class AdapterSlots(nn.Module):
    """Slots of one layer for adapters up to some rank."""

    down: Tensor
    up: Tensor
    ranks: Tensor

    def __init__(
        self, rank: int, count: int, inner: int, widths: Sequence[int], platform: str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        room = 1 << (max(16, rank) - 1).bit_length() if platform == "cuda" else rank
        down = torch.zeros(count, len(widths), room, inner, dtype=dtype)
        self.register_buffer("down", down, persistent=False)
        up = torch.zeros(count, room, sum(widths), dtype=dtype)
        self.register_buffer("up", up, persistent=False)
        self.register_buffer("ranks", torch.zeros(count, dtype=torch.int32), persistent=False)

    def load(self, slot: int, packed: PackedAdapter | None) -> None:
        """Fill a slot; None: with nothing, whose rank is 0. Does not wait."""
        rank = 0 if packed is None else packed.rank
        self.ranks[slot] = rank
        if packed is not None:
            for piece, lines in enumerate(packed.down):
                self.down[slot, piece, :rank].copy_(lines, non_blocking=True)
            self.up[slot, :rank].copy_(packed.up, non_blocking=True)


class LinearAdapters(nn.Module):
    """The slots of one linear layer, whose outputs are pieces of these widths."""

    def __init__(self, inner: int, widths: Sequence[int], sizes: AdapterSizes, target: Target) -> None:
        super().__init__()
        self.inner, self.widths = inner, tuple(widths)
        self._platform, self.dtype = target.platform, sizes.dtype_on(target)
        self.buckets = nn.ModuleList(
            AdapterSlots(rank, count, inner, self.widths, self._platform, self.dtype) for rank, count in sizes.buckets
        )
        self._shrink, self._expand = SHRINK_LORA.bind(target), EXPAND_LORA.bind(target)
        self._expand_gated, self._look_up = EXPAND_LORA_GATED.bind(target), LOOK_UP_LORA.bind(target)
        self.tokens: AdapterTokens | None = None  # set once, when rows are made

    @property
    def is_active(self) -> bool:
        return self.tokens is not None and bool(self.tokens.now)

    def shrink(self, x: Passed) -> list[Tensor]:
        """What `expand` takes, of the layer's input; some token has an adapter."""
        return [self._shrink(whole(x), slots.down, now.tiles, slots.ranks) for slots, now in self._now()]

    def look_up(self, token_ids: Tensor) -> list[Tensor]:
        """The same for a table, whose inputs are tokens."""
        return [self._look_up(token_ids, slots.down, now.slots) for slots, now in self._now()]

    def shrink_beside(self, matmul: Shrinking, x: Tensor, in_parts: bool) -> tuple[Tensor, list[Tensor]]:
        """The same, and the layer's matmul, in one launch for the first bucket."""
        (first, of_first), *others = self._now()
        more = [self._shrink(x, slots.down, now.tiles, slots.ranks) for slots, now in others]
        out, shrunk = matmul(x, first.down, of_first.slots, of_first.tiles, first.ranks, in_parts)
        return out, [shrunk, *more]

    def expand(self, out: Passed, shrunk: Sequence[Tensor]) -> Passed:
        """`out`, the layer's result, with what the tokens' adapters add. Changes it in place."""
        changed = out.values[0] if isinstance(out, PartialSums) else whole(out)
        for part, (slots, now) in zip(shrunk, self._now(), strict=False):
            self._expand(changed, part, slots.up, now.tiles, slots.ranks, self.widths)
        return out if isinstance(out, PartialSums) else changed

    def expand_gated(self, out: Passed, shrunk: Sequence[Tensor], activation: str) -> Tensor:
        """The same and a gated activation after it, in one launch for the last bucket."""
        (slots, now), part = self._now()[-1], shrunk[-1]
        return self._expand_gated(
            whole(self.expand(out, shrunk[:-1])), part, slots.up, now.tiles, slots.ranks, activation
        )

    @property
    def gates(self) -> bool:
        """Whether `expand_gated` is a kernel."""
        return self._expand_gated is not EXPAND_LORA_GATED.reference

    def _now(self) -> list[tuple[AdapterSlots, TokenTiles]]:
        assert self.tokens is not None
        return [(slots, now) for slots, now in zip(self._slots(), self.tokens.now, strict=True)]

    def _slots(self) -> list[AdapterSlots]:
        return [slots for slots in self.buckets if isinstance(slots, AdapterSlots)]

    def pack(self, pairs: Mapping[int, LoraPair], rank: int | None = None) -> PackedAdapter:
        """As a slot has it, in host memory: piece -> what is added to it; to the others nothing is."""
        rank = rank or max(len(pair.down) for pair in pairs.values())
        down = torch.zeros(len(self.widths), rank, self.inner, dtype=self.dtype, device="cpu")
        up = torch.zeros(rank, sum(self.widths), dtype=self.dtype, device="cpu")
        column = 0
        for piece, width in enumerate(self.widths):
            if piece in pairs:
                pair = pairs[piece]
                down[piece, : len(pair.down)] = pair.down
                up[: len(pair.up), column : column + width] = pair.up
            column += width
        if self._platform != "cpu":  # so that copies to the device need not wait for one another
            down, up = down.pin_memory(), up.pin_memory()
        return PackedAdapter(down, up, rank)

    def load(self, slot: int, packed: PackedAdapter | None) -> None:
        """Fill a slot, counted over all buckets; None: with nothing. Does not wait."""
        for slots in self._slots():
            if slot < len(slots.ranks):
                slots.load(slot, packed)
                return
            slot -= len(slots.ranks)


class ExpertAdapters(LinearAdapters):
    """The slots of a grouped layer. A slot is one for each expert, and a row one of the experts of a token."""

    def __init__(
        self, num_experts: int, inner: int, widths: Sequence[int], sizes: AdapterSizes, target: Target
    ) -> None:
        super().__init__(inner, widths, sizes.times(num_experts), target)
        self.num_experts, self._tile = num_experts, TILE_ADAPTERS.bind(Target(target.platform))
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
