"""MLPs of squared ReLUs, which have no gates: dense, and of experts beside a shared one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor

from quire.layers.experts import GroupedDown, GroupedUp, Router
from quire.layers.fusion import Passed, Stage, whole
from quire.layers.linear import ColumnParallelLinear, Linear, Piece, RowParallelLinear
from quire.models.base import BuildContext
from quire.models.config import DecoderConfig
from quire.models.kinds import MLP
from quire.ops.grouped import ADD_SHARED
from quire.types.ledger import EngineSizes, LedgerLine


class SquaredReluMLP(MLP):
    """down(relu(up(x)) ** 2)."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__(config, ctx, layer)
        kind: dict[str, Any] = {"bias": config.mlp_bias, "target": ctx.target, "group": ctx.group}
        self.up_proj = ColumnParallelLinear(config.hidden_size, config.intermediate_size, **kind)
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, **kind)

    def forward(self, hidden: Passed) -> Passed:
        out: Passed = self.down_proj(squared_relu(whole(self.up_proj(hidden))))
        return out


class SquaredReluExperts(MLP):
    """Experts without gates, beside a shared one; they may read and give fewer features than the layer has."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__(config, ctx, layer)
        experts, hidden = config.experts, config.hidden_size
        assert experts is not None, "an MLP of experts needs their sizes"
        count, latent = experts.num_experts, experts.latent_width
        kind: dict[str, Any] = {"target": ctx.target, "group": ctx.group}
        self.router = Router(hidden, count, experts.routing, bias=False, choice_bias=True, target=ctx.target)
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if latent is not None:  # whole on every rank
            into, out_of = Piece(None, latent, 0, latent), Piece(None, hidden, 0, hidden)
            self.fc1_latent_proj = Linear(hidden, (into,), bias=config.mlp_bias, target=ctx.target)
            self.fc2_latent_proj = Linear(latent, (out_of,), bias=config.mlp_bias, target=ctx.target)
        self.experts = UngatedExperts(
            GroupedUp(count, latent or hidden, experts.width, bias=False, **kind),
            GroupedDown(count, experts.width, latent or hidden, bias=False, layout="rows", **kind),
        )
        self.shared = SquaredReluMLP(replace(config, intermediate_size=experts.shared_width or 0), ctx, layer)
        self._add_shared = ADD_SHARED.bind(ctx.target)

    def forward(self, hidden: Passed) -> Passed:
        x = whole(hidden)
        ids, weights = self.router.choose(x)
        read = x if self.fc1_latent_proj is None else whole(self.fc1_latent_proj(x))
        given: Tensor = self.experts(read, ids, weights)
        routed = given if self.fc2_latent_proj is None else whole(self.fc2_latent_proj(given))
        return self._add_shared(routed, whole(self.shared(x)), None)

    def contributes(self, sizes: EngineSizes) -> Iterable[LedgerLine]:
        count = sizes.max_num_batched_tokens
        num_bytes = self.experts.workspace_bytes(count, self.router.routing.top_k)
        yield LedgerLine("experts", num_bytes, f"rows of {count} tokens, one for each of their experts", in_step=True)


class UngatedExperts(Stage):
    def __init__(self, up: GroupedUp, down: GroupedDown) -> None:
        super().__init__()
        self.up_proj, self.down_proj = up, down

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        out: Tensor = self.down_proj(squared_relu(self.up_proj(x, expert_ids)), expert_ids, weights)
        return out

    def workspace_bytes(self, num_tokens: int, top_k: int) -> int:
        up, down, slots = self.up_proj, self.down_proj, num_tokens * top_k
        inside = max(up.method.workspace_bytes(slots, 1), down.method.workspace_bytes(num_tokens, top_k))
        return inside + slots * (up.in_features + 2 * down.in_features) * up.itemsize


def squared_relu(x: Tensor) -> Tensor:
    return x.clamp(min=0.0).square()
