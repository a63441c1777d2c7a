"""LFM2 and LFM2-MoE: short convolutions, and attention in some layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.attention.base import Rotation
from quire.layers.attention import ForwardBatch
from quire.layers.fusion import Passed, whole
from quire.models.base import BuildContext
from quire.models.config import ConfigReader, DecoderConfig, ExpertsConfig, RecurrentConfig, read_config
from quire.models.decoder import EXPERT_MATRICES, EXPERT_WEIGHTS, DecoderLM
from quire.models.recurrent import RecurrentMixer, moved
from quire.ops.recurrent import GATED_CONV
from quire.ops.routing import Routing
from quire.ops.states import StateShape


class ShortConv(RecurrentMixer):
    """c * conv(b * x)."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__(config, ctx, layer)
        size, kind, channels = config.hidden_size, self.kind, (self.full.num_heads, 1)
        self.in_proj = self.project(size, channels, channels, channels, bias=kind.bias)
        self.conv = self.convolve(channels)
        self.out_proj = self.project_out(size, config, bias=kind.bias)
        self._conv = GATED_CONV.bind(ctx.target)

    @classmethod
    def shape_of(cls, kind: RecurrentConfig) -> StateShape:
        return StateShape(kind.num_heads, kind.conv_width)

    def forward(self, hidden: Passed, rotation: Rotation, batch: ForwardBatch) -> Passed:
        bcx = whole(self.in_proj(hidden))
        mixed = self._conv(bcx, self.conv.weight, self.conv.bias, *self.state.place(batch))
        return self.out_proj(self.state.of_wanted(mixed, batch))


MIXER_OF = {"full_attention": "attention", "conv": "short_conv"}
WEIGHTS = EXPERT_WEIGHTS.renaming_first(("feed_forward", "mlp")).renaming(
    ("operator_norm", "attn_norm"),
    ("ffn_norm", "mlp_norm"),
    ("embedding_norm", "norm"),
    ("self_attn.out_proj", "self_attn.o_proj"),
    ("q_layernorm", "qk_norm.q"),
    ("k_layernorm", "qk_norm.k"),
    *moved("conv", "in_proj", "conv", "out_proj"),
    ("mlp.expert_bias", "mlp.router.choice_bias"),
    *EXPERT_MATRICES,
)


class Lfm2(DecoderLM):
    """LFM2: short convolutions, and attention with normed queries and keys in some layers."""

    weight_map = WEIGHTS

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {"norm_eps": 1e-5, "conv_L_cache": 3})
        full = read.get("full_attn_idxs")
        return read_config(
            {**config, "rms_norm_eps": read["norm_eps"], "intermediate_size": _width(read)},
            defaults={"rope_theta": 1_000_000.0, "tie_word_embeddings": read.get("tie_embedding", True)},
            mixers=read.mixers(MIXER_OF, lambda layer: full is None or layer in full),
            qk_norm="head",
            recurrent=RecurrentConfig(
                conv_width=read["conv_L_cache"],
                num_heads=read["hidden_size"],
                bias=read.flag("conv_bias"),
                conv_bias=read.flag("conv_bias"),
            ),
        )


class Lfm2Moe(Lfm2):
    """LFM2-MoE: LFM2 whose MLPs are experts behind the first dense layers, chosen by sigmoid scores and a bias."""

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(
            config,
            {"num_dense_layers": 2, "use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
        )
        routing = Routing(
            read["num_experts_per_tok"],
            score="sigmoid",
            renormalize=read["norm_topk_prob"],
            scale=read["routed_scaling_factor"],
        )
        dense = read["num_dense_layers"]
        return replace(
            super().decoder_config(config),
            mlps=tuple("gated" if layer < dense else "experts" for layer in range(read["num_hidden_layers"])),
            experts=ExpertsConfig(
                read["num_experts"], read["moe_intermediate_size"], routing, choice_bias=read["use_expert_bias"]
            ),
        )


def _width(read: ConfigReader) -> int:
    """Of the MLPs: the config's own may be adjusted."""
    width = int(read.get("block_ff_dim") or read["intermediate_size"])
    if read.get("block_auto_adjust_ff_dim", True) and "num_experts" not in read:
        width = int(read.get("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
        multiple = int(read.get("block_multiple_of", 256))
        width = -(-width // multiple) * multiple
    return width
