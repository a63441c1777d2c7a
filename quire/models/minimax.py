"""MiniMax-Text-01 and M1: lightning attention, attention in some layers, experts; residuals are of normed values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from quire.attention.base import Rotation
from quire.layers.attention import ForwardBatch, WantedTokens
from quire.layers.fusion import Passed, Stage, whole
from quire.models.base import BuildContext
from quire.models.blocks import make_norm
from quire.models.config import ConfigReader, DecoderConfig, RecurrentConfig
from quire.models.decoder import DecoderLM
from quire.models.kinds import MIXERS, MLPS
from quire.models.mixtral import Mixtral
from quire.models.recurrent import recurrent_of
from quire.ops.select import GATHER_ROWS

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
        self,
        hidden: Passed,
        residual: Tensor | None,
        rotation: Rotation,
        batch: ForwardBatch,
        wanted: WantedTokens | None = None,
    ) -> tuple[Passed, None]:
        of_read, of_mixed, of_normed, of_mlp = self._factors
        read: Tensor = self.attn_norm(whole(hidden))
        mixed = whole(self.self_attn(read, rotation, batch, wanted))
        kept = read if wanted is None else self._gather_rows(read, wanted.tokens)
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
        count = read["num_hidden_layers"]
        types = read.get("layer_types") or [
            "linear_attention" if layer % 2 else "full_attention" for layer in range(count)
        ]
        names = {"linear_attention": "lightning", "full_attention": "attention"}
        linear, full, mlp = (
            (float(read[f"{name}_alpha_factor"]), float(read[f"{name}_beta_factor"])) for name in _FACTORS
        )
        common = {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}
        base = Mixtral.decoder_config({**common, **config, "layer_types": None})
        return replace(
            base,
            mixers=read.kinds("layer_types", types, names),
            recurrent=RecurrentConfig(
                num_heads=base.num_heads, key_dim=base.head_dim, scales=linear, beside=full, mlp=mlp
            ),
        )
