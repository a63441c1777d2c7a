"""MLPs of squared ReLUs, which have no gates: dense, and of experts beside a shared one."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from quire.layers.experts import GroupedDown, GroupedUp, Router
from quire.layers.fusion import ROWS, Forms, Passed, on_rows, whole
from quire.layers.linear import ColumnParallelLinear, Linear, Piece, RowParallelLinear
from quire.models.base import BuildContext
from quire.models.config import DecoderConfig
from quire.models.experts import Routed, UngatedExperts
from quire.models.kinds import MLP
from quire.ops.grouped import ADD_SHARED


class SquaredReluMLP(MLP):
    """down(relu(up(x)) ** 2)."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__(config, ctx, layer)
        width, bias = config.intermediate_size, config.mlp_bias
        self.up_proj = ColumnParallelLinear(config.hidden_size, width, bias=bias, **ctx.split)
        self.down_proj = RowParallelLinear(width, config.hidden_size, bias=bias, **ctx.split)

    def feed(self, accepted: Forms) -> None:
        self.down_proj.feed(accepted & ROWS)

    def forward(self, hidden: Passed) -> Passed:
        return self.down_proj(squared_relu(whole(self.up_proj(hidden))))


class SquaredReluExperts(Routed, MLP):
    """Experts without gates, beside a shared one; they may read and give fewer features than the layer has."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__(config, ctx, layer)
        experts, hidden = config.experts, config.hidden_size
        assert experts is not None, "an MLP of experts needs their sizes"
        count, latent = experts.num_experts, experts.latent_width
        self.router = Router(hidden, count, experts.routing, bias=False, choice_bias=True, target=ctx.target)
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if latent is not None:  # whole on every rank
            into, out_of = Piece(None, latent, 0, latent), Piece(None, hidden, 0, hidden)
            self.fc1_latent_proj = Linear(hidden, (into,), bias=config.mlp_bias, target=ctx.target)
            self.fc2_latent_proj = Linear(latent, (out_of,), bias=config.mlp_bias, target=ctx.target)
        self.experts = UngatedExperts(
            GroupedUp(count, latent or hidden, experts.width, bias=False, **ctx.split),
            GroupedDown(count, experts.width, latent or hidden, bias=False, layout="rows", **ctx.split),
            squared_relu,
        )
        self.shared = SquaredReluMLP(replace(config, intermediate_size=experts.shared_width or 0), ctx, layer)
        self._add_shared = ADD_SHARED.bind(ctx.target)

    def feed(self, accepted: Forms) -> None:
        self.shared.feed(accepted)
        if self.fc2_latent_proj is None:
            self.experts.down_proj.feed(accepted)

    def forward(self, hidden: Passed) -> Passed:
        x = whole(hidden)
        ids, weights = self.router.choose(x)
        read = x if self.fc1_latent_proj is None else whole(self.fc1_latent_proj(x))
        given: Passed = self.experts(read, ids, weights)
        routed = given if self.fc2_latent_proj is None else self.fc2_latent_proj(given)
        return on_rows(self._add_shared, routed, self.shared(x), None)


def squared_relu(x: Tensor) -> Tensor:
    return x.clamp(min=0.0).square()
