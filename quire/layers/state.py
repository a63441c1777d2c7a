"""What recurrent layers keep of a row: a state per block. Holds no parameters; mixers call ops over its cache."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend
from quire.attention.state import StateMetadata
from quire.layers.attention import CachedLayer, ForwardBatch
from quire.layers.scheme import Weight, as_tensor
from quire.layers.weights import Filling, WeightedLayer, empty_parameter
from quire.ops.base import Target
from quire.ops.select import GATHER_ROWS
from quire.ops.states import StatePlaces, StateShape
from quire.parallel.groups import ParallelGroup
from quire.types.cache import LayerKV


class StateCache(CachedLayer):
    """A layer's states, which are float32 whatever the type of activations is."""

    def __init__(self, shape: StateShape, target: Target) -> None:
        super().__init__()
        self.shape = shape
        self._gather_rows = GATHER_ROWS.bind(target)

    @property
    def keeps(self) -> LayerKV:
        return keeps_state(self.shape)

    def cache_shape(
        self, backend: AttentionBackend, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> tuple[int, ...]:
        return (num_blocks, self.shape.size)

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def heal(self, block_ids: Tensor) -> None:
        self.cache[block_ids] = self.cache[block_ids].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    def place(self, batch: ForwardBatch) -> tuple[Tensor, StatePlaces, StateShape]:
        """What ops take to find the states of a batch's rows."""
        metadata = batch.attention[self.group]
        assert isinstance(metadata, StateMetadata)
        return self.cache, metadata.places, self.shape

    def of_wanted(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """Of all tokens' results [n, width] those that are asked for; every token had to be folded into the state."""
        wanted = batch.wanted
        if wanted is None:
            return hidden
        self.backend.note_finite(hidden, wanted.finite)
        if batch.adapters is not None:
            batch.adapters.narrow(wanted.tokens)
        return self._gather_rows(hidden, wanted.tokens)


def keeps_state(shape: StateShape) -> LayerKV:
    return LayerKV("state", bytes_per_row=4 * shape.size)


class ConvWeights(WeightedLayer):
    """A depthwise convolution's weights: [channels, 1, width] in checkpoints, [channels, width] here.

    `channels` are those of each tensor in a checkpoint, one after the other here; `kept`: of all of them, those that
    this rank has.
    """

    def __init__(
        self, channels: Mapping[str | None, int], width: int, kept: Tensor | None, *, bias: bool, target: Target
    ) -> None:
        super().__init__()
        self._channels, self._width = channels, width
        self._kept = torch.arange(sum(channels.values()), device="cpu") if kept is None else kept
        self.weight = empty_parameter(len(self._kept), width, dtype=target.dtype)
        self.bias = empty_parameter(len(self._kept), dtype=target.dtype) if bias else None

    def pieces(self, parameter: str) -> dict[str | None, tuple[int, ...]]:
        tail = (1, self._width) if parameter == "weight" else ()
        return {name: (size, *tail) for name, size in self._channels.items()}

    def filling(self, parameter: str, piece: str | None) -> Filling | None:
        found = super().filling(parameter, piece)
        if found is None or parameter != "weight":
            return found
        channels = found.shapes[0][0]  # GGUF leaves out the middle, or has one more
        return found._replace(shapes=(*found.shapes, (channels, self._width), (1, channels, 1, self._width)))

    def load(self, parameter: str, piece: str | None, weight: Weight) -> None:
        sizes, names = list(self._channels.values()), list(self._channels)
        first = 0 if piece is None else sum(sizes[: names.index(piece)])
        given = as_tensor(weight).flatten() if parameter == "bias" else as_tensor(weight).reshape(-1, self._width)
        here = (self._kept >= first) & (self._kept < first + len(given))
        data = self.get_parameter(parameter).data
        data[here.to(data.device)] = given[self._kept[here] - first].to(data)


def rows_of_heads(group: ParallelGroup, *parts: tuple[int, int]) -> Tensor | None:
    """Of a tensor of parts (heads, rows of each head) one after the other, the rows of this rank's heads; None: all.

    Ranks share a head of which there are fewer than ranks.
    """
    if group.size == 1:
        return None
    rows, start = [], 0
    for heads, width in parts:
        if heads >= group.size or group.size % heads:
            first, count = group.slice_of(heads, "recurrent heads")
        else:
            first, count = group.rank * heads // group.size, 1
        rows.append(torch.arange(start + first * width, start + (first + count) * width, device="cpu"))
        start += heads * width
    return torch.cat(rows)
