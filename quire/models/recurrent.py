"""What recurrent mixers share: projections around a state, and vectors of their own in float32."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from quire.layers.linear import Linear, ReorderedLinear, RowParallelLinear
from quire.layers.norm import ParallelRMSNorm
from quire.layers.scheme import Weight, as_tensor
from quire.layers.state import ConvWeights, StateCache, keeps_state, rows_of_heads
from quire.layers.weights import Filling, WeightedLayer, empty_parameter
from quire.models.base import BuildContext
from quire.models.config import DecoderConfig, RecurrentConfig
from quire.models.kinds import Mixer
from quire.ops.recurrent import GATE, GATED_NORM
from quire.ops.states import StateShape
from quire.parallel.groups import ParallelGroup
from quire.types.cache import LayerKV


class RecurrentMixer(Mixer, WeightedLayer):
    """An input projection, a recurrence over the states in `state`, and an output projection."""

    ends = ("in_proj", "out_proj")

    in_proj: Linear
    out_proj: RowParallelLinear

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__(config, ctx, layer)
        self.ctx, self.full, self.kind = ctx, recurrent_of(config), share_of(recurrent_of(config), ctx.group)
        self.state = StateCache(self.shape_of(self.kind), ctx.target)

    @classmethod
    @abstractmethod
    def shape_of(cls, kind: RecurrentConfig) -> StateShape:
        """Of the states that a mixer with these heads keeps."""

    @classmethod
    def keeps(cls, config: DecoderConfig, layer: int) -> LayerKV | None:
        return keeps_state(cls.shape_of(recurrent_of(config)))

    def project(self, in_features: int, *parts: tuple[int, int], bias: bool = False) -> Linear:
        """Of outputs that are parts (heads, outputs of each) one after the other, this rank's heads."""
        kept, size = rows_of_heads(self.ctx.group, *parts), sum(heads * width for heads, width in parts)
        return ReorderedLinear(in_features, {None: size}, {None: kept}, bias=bias, target=self.ctx.target)

    def project_out(self, in_features: int, config: DecoderConfig, *, bias: bool = False) -> RowParallelLinear:
        """in_features: of all ranks."""
        ctx = self.ctx
        return RowParallelLinear(in_features, config.hidden_size, bias=bias, **ctx.split)

    def convolve(self, *parts: tuple[int, int], names: tuple[str | None, ...] = (None,)) -> ConvWeights:
        """Weights for channels that are parts as in `project`; `names`: of tensors of as many channels each."""
        channels = sum(heads * width for heads, width in parts) // len(names)
        kept, kind = rows_of_heads(self.ctx.group, *parts), self.kind
        given = dict.fromkeys(names, channels)
        return ConvWeights(given, kind.conv_width, kept, bias=kind.conv_bias, target=self.ctx.target)

    def vector(self, *shape: int) -> torch.nn.Parameter:
        """A rank's part of a parameter whose first dimension is split over ranks."""
        return empty_parameter(*shape, dtype=torch.float32)

    def pieces(self, parameter: str) -> dict[str | None, tuple[int, ...]]:
        first, *others = self.get_parameter(parameter).shape
        return {None: (first * self.ctx.group.size, *others)}

    def filling(self, parameter: str, piece: str | None) -> Filling | None:
        found = super().filling(parameter, piece)
        if found is None:
            return None
        (first, *others), heads = found.shapes[0], self.full.num_heads
        more = (first, *others, 1), (1, 1, heads, 1)  # as GGUF has vectors, and as Kimi has decays
        return found._replace(shapes=(*found.shapes, *(more if first == heads and not others else more[:1])))

    def load(self, parameter: str, piece: str | None, weight: Weight) -> None:
        """A_log is kept as what decays are made with."""
        kept, group = self.get_parameter(parameter), self.ctx.group
        tensor = as_tensor(weight)  # float64 is of a file that has decays: their logarithms, not rounded
        given = (tensor if tensor.dtype == torch.float64 else tensor.float()).reshape(group.size, *kept.shape)
        given = given[group.rank]
        kept.data.copy_(-given.exp() if parameter == "A_log" else given)


class GatedNorm(WeightedLayer):
    """The norm behind a recurrence, with the gate beside it."""

    def __init__(
        self, width: int, *, eps: float, groups: int, shared: bool, norm_first: bool, sigmoid: bool, ctx: BuildContext
    ) -> None:
        """width, groups: of this rank; `shared`: all groups have one weight."""
        super().__init__()
        self.weight = empty_parameter(width // groups if shared else width, dtype=ctx.dtype)
        self._kind = (eps, groups, norm_first, sigmoid)
        self._ranks, self._rank = (1, 0) if shared else (ctx.group.size, ctx.group.rank)
        self._parts = (groups * self._ranks, width // groups)
        self._norm = GATED_NORM.bind(ctx.target)

    def pieces(self, parameter: str) -> dict[str | None, tuple[int, ...]]:
        return {None: (self.weight.shape[0] * self._ranks,)}

    def filling(self, parameter: str, piece: str | None) -> Filling | None:
        found = super().filling(parameter, piece)
        return found and found._replace(shapes=(*found.shapes, self._parts))  # as GGUF has it

    def load(self, parameter: str, piece: str | None, weight: Weight) -> None:
        self.weight.data.copy_(as_tensor(weight).reshape(self._ranks, -1)[self._rank])

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self._norm(x, gate, self.weight, *self._kind)


class WholeGatedNorm(ParallelRMSNorm):
    """The norm of gated values over the features of all ranks."""

    def __init__(self, width: int, *, eps: float, ctx: BuildContext) -> None:
        super().__init__(width, eps=eps, **ctx.split)
        self._gate = GATE.bind(ctx.target)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        assert gate is not None
        return super().forward(self._gate(x, gate, True))


def moved(module: str, *names: str) -> tuple[tuple[str, str], ...]:
    """Renamings of what a checkpoint keeps in `module` to where a mixer's weights are."""
    return tuple((f"{module}.{name}", f"self_attn.{'gated_norm' if name == 'norm' else name}") for name in names)


def recurrent_of(config: DecoderConfig) -> RecurrentConfig:
    assert config.recurrent is not None, "a recurrent mixer needs its sizes"
    return config.recurrent


def share_of(kind: RecurrentConfig, group: ParallelGroup) -> RecurrentConfig:
    """What a rank holds: its heads, and the heads of keys that these read."""
    if group.size == 1:
        return kind
    _, heads = group.slice_of(kind.num_heads, "recurrent heads")
    return replace(kind, num_heads=heads, num_key_heads=-(-kind.num_key_heads // group.size))
