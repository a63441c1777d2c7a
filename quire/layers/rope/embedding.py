"""RotaryEmbedding: the cos/sin table of one set of RoPE parameters, fixed when the model is built."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.layers.rope.frequencies import ROPE_TYPES
from quire.layers.rope.parameters import QueryTemperature, RopeParameters, choice_by_length
from quire.ops.base import Target
from quire.ops.rope import GATHER_ROTATION, GATHER_ROTATION_BY_AXIS
from quire.platform.base import HOST

NUM_AXES = 3  # time, height and width


class RotaryEmbedding(nn.Module):
    """Frequencies come from `max_model_len` and never change, so chunking cannot change a rotation.

    Keys are cached rotated, and a cached prefix serves sequences of any length: none can have its own frequencies.
    """

    note: str | None  # what a user should know about that

    cos_sin: Tensor  # [max_model_len, rotary_dim] float32: cosines, then sines

    def __init__(self, rope: RopeParameters, max_model_len: int, target: Target) -> None:
        super().__init__()
        device = torch.get_default_device()
        with HOST:
            frequencies, factor = ROPE_TYPES.get(rope.rope_type)(rope, max_model_len)
            angles = torch.arange(max_model_len, dtype=torch.float32).unsqueeze(1) * frequencies
            table = torch.cat((angles.cos(), angles.sin()), dim=-1) * factor
        self.register_buffer("cos_sin", table.to(device), persistent=False)
        self.note = choice_by_length(rope, max_model_len)
        self._dtype = target.dtype
        self._gather = GATHER_ROTATION.bind(target)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of one step, for `apply_rope`; positions: [n]."""
        return self._gather(self.cos_sin, positions, self._dtype)


class SectionedRotaryEmbedding(RotaryEmbedding):
    """RoPE of tokens with a position on each of several axes: sections of the frequencies take turns at them."""

    axes: Tensor  # [rotary_dim / 2] int64: the axis of each frequency

    def __init__(self, rope: RopeParameters, max_model_len: int, target: Target) -> None:
        super().__init__(rope, max_model_len, target)
        device = torch.get_default_device()
        with HOST:
            axes = torch.arange(len(rope.sections)) % NUM_AXES
            axes = axes.repeat_interleave(torch.tensor(rope.sections))
        self.register_buffer("axes", axes.to(device), persistent=False)
        self._gather_by_axis = GATHER_ROTATION_BY_AXIS.bind(target)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: [NUM_AXES, n], or [n] for tokens whose positions are the same on all axes."""
        if positions.dim() == 1:
            return super().forward(positions)
        return self._gather_by_axis(self.cos_sin, positions, self.axes, self._dtype)


class TemperatureTable(nn.Module):
    """Factors of queries, by position, in place of cosines: the first number of each token's line is its factor."""

    note = None
    factors: Tensor  # [max_model_len, 2] float32, each with a 0 beside it

    def __init__(self, temperature: QueryTemperature, max_model_len: int, target: Target) -> None:
        super().__init__()
        device = torch.get_default_device()
        with HOST:
            steps = torch.floor((torch.arange(max_model_len, dtype=torch.float32) + 1.0) / temperature.floor_scale)
            factors = torch.log1p(steps) * temperature.strength + 1.0
            table = torch.stack((factors, torch.zeros_like(factors)), dim=1)
        self.register_buffer("factors", table.to(device), persistent=False)
        self._gather = GATHER_ROTATION.bind(target)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._gather(self.factors, positions, torch.float32)


def rotary_embedding(
    rope: RopeParameters | QueryTemperature, max_model_len: int, target: Target
) -> RotaryEmbedding | TemperatureTable:
    if isinstance(rope, QueryTemperature):
        return TemperatureTable(rope, max_model_len, target)
    kind = SectionedRotaryEmbedding if rope.sections else RotaryEmbedding
    return kind(rope, max_model_len, target)
