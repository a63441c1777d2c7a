"""How the KV of a model's layers is laid out in blocks. Knows sizes and windows, never tensors or requests.

Layers of one kind are cut into groups of `num_slots` layers, and all groups draw from one block pool: physical
memory is `num_slots` cache tensors, and layer k of a group uses tensor k at the block ids its group owns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quire.types.errors import ConfigError

LayerKind = Literal["full", "sliding"]


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one layer of a model keeps."""

    kind: LayerKind
    window: int | None  # sliding: a query sees itself and the window-1 tokens before it
    bytes_per_token: int  # keys and values together


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table per request; layers[k] uses cache tensor k."""

    index: int
    kind: LayerKind
    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVLayout:
    groups: tuple[KVGroup, ...]
    block_size: int  # tokens per block
    num_slots: int  # cache tensors
    page_bytes: int  # bytes of one block over all slots

    def blocks_for(self, num_tokens: int, step_tokens: int) -> int:
        """Blocks that a request of `num_tokens` holds at its peak, computing at most `step_tokens` a step."""
        total = ceil_div(num_tokens, self.block_size)
        num_blocks = 0
        for group in self.groups:
            if group.window is None:
                num_blocks += total
            else:
                # A step reads the window-1 tokens before its first one; a span of n tokens that starts
                # anywhere touches up to ceil((n - 1) / block_size) + 1 blocks.
                span = group.window - 1 + step_tokens
                num_blocks += min(total, ceil_div(span - 1, self.block_size) + 1)
        return num_blocks


def plan_layout(layers: Sequence[LayerKV], block_size: int) -> KVLayout:
    """Cut a model's layers into groups of equal size that can share one pool of blocks."""
    if not layers:
        raise ConfigError("a KV layout needs at least one layer; the model declares none")
    kinds: dict[tuple[LayerKind, int | None], list[int]] = {}
    for index, layer in enumerate(layers):
        if (layer.kind == "sliding") != (layer.window is not None) or (layer.window is not None and layer.window < 1):
            raise ConfigError(
                f"layer {index} is {layer.kind} with window {layer.window}; "
                "a sliding layer needs a window of at least 1 and a full one has none"
            )
        kinds.setdefault((layer.kind, layer.window), []).append(index)
    num_slots = min(len(members) for members in kinds.values())
    groups: list[KVGroup] = []
    # Full groups first: their hit is the cheapest to find and bounds the hits of the others.
    for (kind, window), members in sorted(kinds.items(), key=lambda item: (item[0][0], item[0][1] or 0)):
        for start in range(0, len(members), num_slots):
            groups.append(KVGroup(len(groups), kind, window, tuple(members[start : start + num_slots])))
    bytes_per_token = max(layer.bytes_per_token for layer in layers)
    return KVLayout(tuple(groups), block_size, num_slots, num_slots * block_size * bytes_per_token)


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)
