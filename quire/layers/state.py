"""What recurrent layers keep of a row: a state per block. Holds no parameters; mixers call ops over its cache."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend
from quire.attention.state import StateMetadata
from quire.layers.attention import CachedLayer, ForwardBatch, WantedTokens
from quire.layers.scheme import Weight, as_tensor
from quire.layers.weights import Filling, WeightedLayer, empty_parameter
from quire.ops.base import Target
from quire.ops.select import GATHER_ROWS
from quire.ops.states import StatePlaces, StateShape
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

    def places(self, batch: ForwardBatch) -> StatePlaces:
        metadata = batch.attention[self.group]
        assert isinstance(metadata, StateMetadata)
        return metadata.places

    def of_wanted(self, hidden: Tensor, wanted: WantedTokens | None, batch: ForwardBatch) -> Tensor:
        """Of all tokens' results [n, width] those that are asked for; every token had to be folded into the state."""
        if wanted is None:
            return hidden
        self.backend.note_finite(hidden, wanted.finite)
        if batch.adapters is not None:
            batch.adapters.narrow(wanted.tokens)
        return self._gather_rows(hidden, wanted.tokens)


def keeps_state(shape: StateShape) -> LayerKV:
    return LayerKV("state", bytes_per_row=4 * shape.size)


class ConvWeights(WeightedLayer):
    """A depthwise convolution's weights: [channels, 1, width] in checkpoints, [channels, width] here."""

    def __init__(self, channels: int, width: int, *, bias: bool, target: Target) -> None:
        super().__init__()
        self.weight = empty_parameter(channels, width, dtype=target.dtype)
        self.bias = empty_parameter(channels, dtype=target.dtype) if bias else None

    def pieces(self, parameter: str) -> dict[str | None, tuple[int, ...]]:
        channels, width = self.weight.shape
        return {None: (channels, 1, width) if parameter == "weight" else (channels,)}

    def filling(self, parameter: str, piece: str | None) -> Filling | None:
        found = super().filling(parameter, piece)
        if found is None or parameter != "weight":
            return found
        return found._replace(shapes=(*found.shapes, tuple(self.weight.shape)))  # GGUF leaves out the middle

    def load(self, parameter: str, piece: str | None, weight: Weight) -> None:
        kept = self.get_parameter(parameter)
        kept.data.copy_(as_tensor(weight).view(kept.shape))
