"""How what a model's layers keep is laid out in blocks. Knows sizes and kinds, never tensors or requests.

Layers that keep the same form and size share a pool of blocks, whatever their kinds: no group is padded to the size
of another. In a pool, the layers of one kind are cut into groups of `num_slots` layers: physical memory is
`num_slots` cache tensors, and layer k of a group uses tensor k at the block ids its group owns. All latents are one
group, though some have an index key beside them and wider tensors: layers share the slots that an indexer chooses.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from quire.kv.kinds import KINDS, STATES_OF_A_ROW, GroupKind
from quire.types.cache import KVForm, LayerKV
from quire.types.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table per request; layers[k] uses cache tensor k of the pool."""

    index: int
    kind: str
    window: int | None
    layers: tuple[int, ...]
    pool: int = 0
    form: KVForm | None = None  # what its layers keep of a token; None: a state

    def rule(self, block_size: int) -> GroupKind:
        return KINDS.get(self.kind)(self.window, block_size)


@dataclass(frozen=True, slots=True)
class KVPool:
    """Blocks of one size, each a part of every cache tensor of the pool."""

    slots: tuple[int, ...]  # of each cache tensor the bytes of one block: the stride between blocks
    per_row: bool = False  # whether a block holds a state and not tokens

    @property
    def page_bytes(self) -> int:
        """Bytes of one block over all slots."""
        return sum(self.slots)


@dataclass(frozen=True, slots=True)
class KVLayout:
    groups: tuple[KVGroup, ...]
    block_size: int  # tokens per block
    pools: tuple[KVPool, ...]

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of every pool."""
        return sum(pool.page_bytes for pool in self.pools)

    def part(self, members: Sequence[int]) -> KVLayout:
        """The same groups and pools for a process that holds these layers alone, which count from 0 there."""
        place = {layer: index for index, layer in enumerate(members)}
        groups = tuple(
            replace(group, layers=tuple(place[layer] for layer in group.layers if layer in place))
            for group in self.groups
        )
        pools = tuple(replace(pool, slots=self._slots_of(index, place)) for index, pool in enumerate(self.pools))
        return KVLayout(groups, self.block_size, pools)

    def _slots_of(self, pool: int, members: Collection[int]) -> tuple[int, ...]:
        """Those of its group that has most of these layers, at least one; several groups have slots of one size."""
        slots = self.pools[pool].slots
        held = [[slots[k] for k, n in enumerate(group.layers) if n in members] for group in self.groups_of(pool)]
        longest: list[int] = max(held, key=len)
        return tuple(longest) or slots[:1]

    def groups_of(self, pool: int) -> tuple[KVGroup, ...]:
        return tuple(group for group in self.groups if group.pool == pool)

    def blocks_for(self, num_tokens: int, step_tokens: int) -> tuple[int, ...]:
        """Blocks of each pool that a request holds at its peak, computing at most `step_tokens` a step."""
        needed = [0] * len(self.pools)
        for group in self.groups:
            needed[group.pool] += group.rule(self.block_size).blocks_for(num_tokens, step_tokens)
        return tuple(needed)

    def bytes_for(self, num_tokens: int, step_tokens: int) -> int:
        """Memory in which one request of `num_tokens` can run, the null block of each pool included."""
        return self.num_bytes([count + 1 for count in self.blocks_for(num_tokens, step_tokens)])

    def layer_bytes(self, num_tokens: int, step_tokens: int) -> dict[int, int]:
        """Of each layer, its share of the memory for one request of `num_tokens`; all of a pool share its blocks."""
        found: dict[int, int] = {}
        for index, count in enumerate(self.blocks_for(num_tokens, step_tokens)):
            layers = [layer for group in self.groups_of(index) for layer in group.layers]
            found |= dict.fromkeys(layers, count * self.pools[index].page_bytes // len(layers))
        return found

    def num_bytes(self, num_blocks: Sequence[int]) -> int:
        """Memory that `num_blocks` of each pool take."""
        return sum(count * pool.page_bytes for count, pool in zip(num_blocks, self.pools, strict=True))

    def num_blocks_for(
        self, num_bytes: int, num_tokens: int, step_tokens: int, num_rows: int = 1, checkpoints: int | None = None
    ) -> tuple[int, ...]:
        """Blocks of each pool for `num_bytes` of memory, which they share as requests of `num_tokens` need them.

        Every pool gets its null block, and enough for one such request if the memory is `bytes_for` it. Of what is
        left, states get what `num_rows` rows hold, at most a half, and as many bytes for checkpoints, by default a
        quarter.
        """
        if len(self.pools) == 1:
            return (num_bytes // self.page_bytes,)
        needed = self.blocks_for(num_tokens, step_tokens)
        states = self.num_bytes([pool.per_row for pool in self.pools])
        if not states:
            left, one = max(0, num_bytes - self.page_bytes), self.num_bytes(needed)
            return tuple(1 + left * count // one for count in needed)
        left = max(0, num_bytes - self.bytes_for(num_tokens, step_tokens))
        held = (num_rows - 1) * STATES_OF_A_ROW * states
        wanted = min(held, left // 2) + (left // 4 if checkpoints is None else checkpoints)
        of_states = left if all(pool.per_row for pool in self.pools) else min(wanted, left)
        tokens = self.num_bytes([0 if pool.per_row else n for pool, n in zip(self.pools, needed, strict=True)])
        return tuple(
            1 + n + (of_states // states if pool.per_row else (left - of_states) * n // tokens)
            for pool, n in zip(self.pools, needed, strict=True)
        )

    def num_rows(self, num_blocks: Sequence[int], num_tokens: int, step_tokens: int) -> int:
        """Requests whose states these blocks hold at once, one of them computing its prompt."""
        counts = zip(self.pools, num_blocks, self.blocks_for(num_tokens, step_tokens), strict=True)
        found = (1 + (count - 1 - one) // STATES_OF_A_ROW for pool, count, one in counts if pool.per_row)
        return min(found, default=sys.maxsize)

    def num_tokens(self, num_blocks: Sequence[int]) -> int:
        """Tokens that `num_blocks` of each pool hold if every group keeps every token."""
        pools = [index for index, pool in enumerate(self.pools) if not pool.per_row] or range(len(self.pools))
        return min(num_blocks[pool] * self.block_size // len(self.groups_of(pool)) for pool in pools)


def plan_layout(layers: Sequence[LayerKV], block_size: int) -> KVLayout:
    """Cut a model's layers into groups of equal size for each pool of blocks."""
    if not layers:
        raise ConfigError("a KV layout needs at least one layer; the model declares none")
    pools: dict[tuple[bool, KVForm | None, int], dict[tuple[str, int | None], list[int]]] = {}
    for index, layer in enumerate(layers):
        window = layer.window
        if KINDS.get(layer.kind).has_window != (window is not None) or (window is not None and window < 1):
            raise ConfigError(
                f"layer {index} is {layer.kind} with window {window}; "
                "a sliding or chunked layer needs a window of at least 1 and others have none"
            )
        size = layer.block_bytes(block_size)
        if size < 1:
            raise ConfigError(f"layer {index} is {layer.kind} and declares neither bytes per token nor per row")
        form = layer.form
        if form is not None and form.value_dim is not None:  # one kind, so one group: its slots may differ in size
            form, size = replace(form, index_dim=0), 0
        kinds = pools.setdefault((layer.bytes_per_row > 0, form, size), {})
        kinds.setdefault((layer.kind, layer.window), []).append(index)
    groups: list[KVGroup] = []
    sizes: list[KVPool] = []
    # Full groups first: their hit is the cheapest to find and bounds the hits of the others. States last: where their
    # hit is shorter than that of the others, that is worth a checkpoint.
    for (per_row, form, _), kinds in sorted(pools.items(), key=lambda pool: (pool[0][0], min(map(_order, pool[1])))):
        first = min(kinds.values(), key=len)
        num_slots = len(first)
        for (kind, window), members in sorted(kinds.items(), key=lambda item: _order(item[0])):
            for start in range(0, len(members), num_slots):
                cut = tuple(members[start : start + num_slots])
                groups.append(KVGroup(len(groups), kind, window, cut, len(sizes), form))
        sizes.append(KVPool(tuple(layers[index].block_bytes(block_size) for index in first), per_row))
    return KVLayout(tuple(groups), block_size, tuple(sizes))


def _order(kind: tuple[str, int | None]) -> tuple[bool, str, int]:
    name, window = kind
    return KINDS.get(name).releases, name, window or 0
