"""MiniMax-Text-01 and M1: lightning attention, attention in some layers, experts; residuals are of normed values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quire.attention.base import Rotation
from quire.layers.attention import ForwardBatch
from quire.layers.fusion import PLAIN, Passed, Stage, whole
from quire.layers.linear import ColumnParallelLinear
from quire.layers.norm import ParallelRMSNorm
from quire.models.base import BuildContext
from quire.models.blocks import make_norm
from quire.models.config import ConfigReader, DecoderConfig, RecurrentConfig
from quire.models.decoder import DecoderLM
from quire.models.kinds import MIXERS, MLPS
from quire.models.mixtral import Mixtral
from quire.models.recurrent import RecurrentMixer, recurrent_of
from quire.ops.recurrent import GATE, LINEAR_ATTENTION
from quire.ops.select import GATHER_ROWS
from quire.ops.states import StateShape


class Lightning(RecurrentMixer):
    """Linear attention whose heads decay by constants, a norm over all heads, a gate."""

    accepts = PLAIN
    decays: Tensor  # [heads] float32

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__(config, ctx, layer)
        heads, dim = self.full.num_heads, self.full.key_dim
        width = heads * dim
        self.qkv_proj = self.project(config.hidden_size, (heads, 3 * dim))
        self.output_gate = ColumnParallelLinear(config.hidden_size, width, bias=False, **ctx.split)
        self.gated_norm = ParallelRMSNorm(width, eps=self.kind.eps, **ctx.split)
        self.out_proj = self.project_out(width, config)
        first, count = ctx.group.slice_of(heads, "recurrent heads")
        depth = 1.0 - layer / (config.num_layers - 1 + 1e-5) + 1e-5
        rates = torch.arange(first + 1, first + count + 1, dtype=torch.float32) * (-8.0 / heads)
        self.register_buffer("decays", torch.exp(-torch.exp2(rates) * depth), persistent=False)
        self._attend, self._gate = LINEAR_ATTENTION.bind(ctx.target), GATE.bind(ctx.target)

    @classmethod
    def shape_of(cls, kind: RecurrentConfig) -> StateShape:
        return StateShape(0, 1, kind.num_heads, kind.num_heads, kind.key_dim, kind.key_dim)

    def forward(self, hidden: Passed, rotation: Rotation, batch: ForwardBatch) -> Passed:
        x = whole(hidden)
        qkv = whole(self.qkv_proj(x))
        qkv = self._gate(torch.ones_like(qkv), qkv, True)
        mixed = self._attend(qkv, self.decays, *self.state.place(batch))
        gated = self._gate(self.gated_norm(mixed), whole(self.output_gate(x)))
        return self.out_proj(self.state.of_wanted(gated, batch))


_FACTORS = ("linear_attn", "full_attn", "mlp")


class NormedResidualLayer(Stage):
    """What mixer and MLP give is added, with factors, to what they read."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__()
        kind, mixer = recurrent_of(config), config.mixers[layer]
        self.self_attn = MIXERS.get(mixer)(config, ctx, layer)
        self.mlp = MLPS.get(config.mlps[layer])(config, ctx, layer)
        self.attn_norm, self.mlp_norm = make_norm(config, ctx), make_norm(config, ctx)
        self._factors = (*(kind.scales if mixer == "lightning" else kind.beside), *kind.mlp)
        self._gather_rows = GATHER_ROWS.bind(ctx.target)

    def forward(
        self, hidden: Passed, residual: Tensor | None, rotation: Rotation, batch: ForwardBatch
    ) -> tuple[Passed, None]:
        of_read, of_mixed, of_normed, of_mlp = self._factors
        read: Tensor = self.attn_norm(whole(hidden))
        mixed = whole(self.self_attn(read, rotation, batch))
        kept = read if batch.wanted is None else self._gather_rows(read, batch.wanted.tokens)
        normed: Tensor = self.mlp_norm(kept * of_read + mixed * of_mixed)
        return normed * of_normed + whole(self.mlp(normed)) * of_mlp, None


class MiniMax(DecoderLM):
    layer_type = NormedResidualLayer
    weight_map = Mixtral.weight_map.renaming(("self_attn.norm", "self_attn.gated_norm")).ignoring(
        *(f"*.self_attn.{name}" for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay"))
    )

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {f"{name}_{kind}_factor": 1.0 for name in _FACTORS for kind in ("alpha", "beta")})
        names = {"linear_attention": "lightning", "full_attention": "attention"}
        linear, full, mlp = (
            (float(read[f"{name}_alpha_factor"]), float(read[f"{name}_beta_factor"])) for name in _FACTORS
        )
        common = {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}
        base = Mixtral.decoder_config({**common, **config, "layer_types": None})
        return replace(
            base,
            mixers=read.mixers(names, lambda layer: layer % 2 == 0),
            recurrent=RecurrentConfig(
                num_heads=base.num_heads, key_dim=base.head_dim, scales=linear, beside=full, mlp=mlp
            ),
        )
