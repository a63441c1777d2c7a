"""What recurrent mixers share: projections around a state, and vectors of their own in float32."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from quire.layers.fusion import Forms
from quire.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from quire.layers.scheme import Weight, as_tensor
from quire.layers.state import StateCache, keeps_state
from quire.layers.weights import Filling, WeightedLayer, empty_parameter
from quire.models.base import BuildContext
from quire.models.config import DecoderConfig, RecurrentConfig
from quire.models.kinds import Mixer
from quire.ops.recurrent import GATED_NORM
from quire.ops.states import StateShape
from quire.types.cache import LayerKV
from quire.types.errors import ConfigError


class RecurrentMixer(Mixer, WeightedLayer):
    """An input projection, a recurrence over the states in `state`, and an output projection."""

    in_proj: ColumnParallelLinear | MergedColumnParallelLinear
    out_proj: RowParallelLinear

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__(config, ctx, layer)
        if ctx.group.size > 1:
            raise ConfigError("recurrent layers are not split over ranks; set the tensor parallel size to 1")
        self.ctx = ctx
        self.state = StateCache(self.shape_of(config), ctx.target)

    @classmethod
    @abstractmethod
    def shape_of(cls, config: DecoderConfig) -> StateShape:
        """Of the states that the mixer keeps."""

    @classmethod
    def keeps(cls, config: DecoderConfig, layer: int) -> LayerKV | None:
        return keeps_state(cls.shape_of(config))

    @property
    def accepts(self) -> Forms:
        return self.in_proj.accepts

    def feed(self, accepted: Forms) -> None:
        self.out_proj.feed(accepted)

    def project(self, in_features: int, out_features: int, *, bias: bool = False) -> ColumnParallelLinear:
        ctx = self.ctx
        return ColumnParallelLinear(in_features, out_features, bias=bias, target=ctx.target, group=ctx.group)

    def project_out(self, in_features: int, config: DecoderConfig, *, bias: bool = False) -> RowParallelLinear:
        ctx = self.ctx
        return RowParallelLinear(in_features, config.hidden_size, bias=bias, target=ctx.target, group=ctx.group)

    def vector(self, *shape: int) -> torch.nn.Parameter:
        return empty_parameter(*shape, dtype=torch.float32)

    def filling(self, parameter: str, piece: str | None) -> Filling | None:
        found = super().filling(parameter, piece)
        return found and found._replace(shapes=(*found.shapes, (*found.shapes[0], 1)))  # as GGUF has vectors

    def load(self, parameter: str, piece: str | None, weight: Weight) -> None:
        """A_log is kept as what decays are made with."""
        kept, given = (
            self.get_parameter(parameter),
            as_tensor(weight).float().view(self.get_parameter(parameter).shape),
        )
        kept.data.copy_(-given.exp() if parameter == "A_log" else given)


class GatedNorm(WeightedLayer):
    """The norm behind a recurrence, with the gate beside it."""

    def __init__(
        self, width: int, *, eps: float, groups: int, shared: bool, norm_first: bool, sigmoid: bool, ctx: BuildContext
    ) -> None:
        """`shared`: all groups have one weight."""
        super().__init__()
        self.weight = empty_parameter(width // groups if shared else width, dtype=ctx.dtype)
        self._kind = (eps, groups, norm_first, sigmoid)
        self._parts = (groups, width // groups)
        self._norm = GATED_NORM.bind(ctx.target)

    def filling(self, parameter: str, piece: str | None) -> Filling | None:
        found = super().filling(parameter, piece)
        return found and found._replace(shapes=(*found.shapes, self._parts))  # as GGUF has it

    def load(self, parameter: str, piece: str | None, weight: Weight) -> None:
        self.weight.data.copy_(as_tensor(weight).view(self.weight.shape))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self._norm(x, gate, self.weight, *self._kind)


def moved(module: str, *names: str) -> tuple[tuple[str, str], ...]:
    """Renamings of what a checkpoint keeps in `module` to where a mixer's weights are."""
    return tuple((f"{module}.{name}", f"self_attn.{'gated_norm' if name == 'norm' else name}") for name in names)


def recurrent_of(config: DecoderConfig) -> RecurrentConfig:
    assert config.recurrent is not None, "a recurrent mixer needs its sizes"
    return config.recurrent
