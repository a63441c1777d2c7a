"""Nemotron-H: each layer is Mamba-2, attention without RoPE, or an MLP of squared ReLUs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from quire.layers.fusion import Passed, whole
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.models.base import BuildContext
from quire.models.config import ConfigReader, DecoderConfig, RecurrentConfig, read_config
from quire.models.decoder import PRE_NORM_WEIGHTS, DecoderLM
from quire.models.kinds import MLP, NONE
from quire.models.mamba2 import MAMBA_NAMES
from quire.models.recurrent import moved
from quire.types.errors import ModelError

_BY_LETTER = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_MIXERS = {**dict.fromkeys(("linear_attention", "mamba"), "mamba2"), "full_attention": "attention"}
_MIXERS["attention"] = "attention"


class SquaredReluMLP(MLP):
    """down(relu(up(x)) ** 2)."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__(config, ctx, layer)
        kind: dict[str, Any] = {"bias": config.mlp_bias, "target": ctx.target, "group": ctx.group}
        self.up_proj = ColumnParallelLinear(config.hidden_size, config.intermediate_size, **kind)
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, **kind)

    def forward(self, hidden: Passed) -> Passed:
        out: Passed = self.down_proj(whole(self.up_proj(hidden)).clamp(min=0.0).square())
        return out


class NemotronH(DecoderLM):
    weight_map = PRE_NORM_WEIGHTS.renaming(
        ("backbone.embeddings", "model.embed_tokens"),
        ("backbone.norm_f", "model.norm"),
        ("backbone.layers", "model.layers"),
        ("model.embeddings", "model.embed_tokens"),
        ("model.norm_f", "model.norm"),
        *moved("mixer", *MAMBA_NAMES, "q_proj", "k_proj", "v_proj", "o_proj"),
    )

    def __init__(self, config: DecoderConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        norms = [
            (f"layers.{layer}.norm", f"layers.{layer}.{'mlp_norm' if mixer == NONE else 'attn_norm'}")
            for layer, mixer in enumerate(config.mixers)
        ]
        names = [("mixer.up_proj", "mlp.up_proj"), ("mixer.down_proj", "mlp.down_proj")]
        stack = {"qkv_proj": self.weight_map.stack["qkv_proj"]}
        self.weight_map = replace(self.weight_map.renaming(*norms, *names), stack=stack)

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {"layer_norm_epsilon": 1e-5, "time_step_min": 0.001})
        pattern = read.get("hybrid_override_pattern") or ""
        types = read.get("layers_block_type") or read.get("layer_types")
        types = types or [_BY_LETTER.get(kind, kind) for kind in pattern]
        unknown = sorted(set(types) - {*_MIXERS, "mlp", "moe"})
        if unknown or not types:
            raise ModelError(
                "layers_block_type (layer_types, hybrid_override_pattern) must name a known kind for each layer;"
                f" it has {', '.join(map(repr, unknown)) or 'no entries'}"
            )
        if "moe" in types:
            raise ModelError("this Nemotron-H has experts without gates, which are not supported; choose a dense one")
        heads, groups = read["mamba_num_heads"], read["n_groups"]
        count = len(types)
        return read_config(
            {**config, "num_hidden_layers": count, "rms_norm_eps": read["layer_norm_epsilon"]},
            rope=(None,) * count,
            mixers=tuple(_MIXERS.get(kind, NONE) for kind in types),
            mlps=tuple("squared_relu" if kind == "mlp" else NONE for kind in types),
            recurrent=RecurrentConfig(
                conv_width=read["conv_kernel"],
                num_heads=heads,
                num_key_heads=groups,
                key_dim=read["ssm_state_size"],
                value_dim=read["mamba_head_dim"],
                bias=read.flag("mamba_proj_bias"),
                conv_bias=bool(read.get("use_conv_bias", True)),
                eps=read["layer_norm_epsilon"],
                norm_groups=groups,
                dt_limits=(float(read["time_step_min"]), math.inf),
            ),
        )
