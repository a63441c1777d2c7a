"""Nemotron-H: each layer is Mamba-2, attention without RoPE, or an MLP of squared ReLUs, dense or of experts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from quire.models.base import BuildContext
from quire.models.config import ConfigReader, DecoderConfig, ExpertsConfig, RecurrentConfig, read_config
from quire.models.decoder import PRE_NORM_WEIGHTS, DecoderLM
from quire.models.dots1 import grouped_experts
from quire.models.kinds import NONE
from quire.models.mamba import MAMBA_NAMES
from quire.models.recurrent import moved
from quire.types.errors import ModelError

_BY_LETTER = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_MIXERS = {**dict.fromkeys(("linear_attention", "mamba"), "mamba2"), "full_attention": "attention"}
_MIXERS["attention"] = "attention"


class NemotronH(DecoderLM):
    weight_map = PRE_NORM_WEIGHTS.renaming(
        ("backbone.embeddings", "model.embed_tokens"),
        ("backbone.norm_f", "model.norm"),
        ("backbone.layers", "model.layers"),
        ("model.embeddings", "model.embed_tokens"),
        ("model.norm_f", "model.norm"),
        ("mixer.gate", "mlp.router"),
        ("e_score_correction_bias", "choice_bias"),
        *((f"mixer.{name}", f"mlp.{name}") for name in ("experts", "fc1_latent_proj", "fc2_latent_proj")),
        ("mixer.shared_experts", "mlp.shared"),
        *moved("mixer", *MAMBA_NAMES, "q_proj", "k_proj", "v_proj", "o_proj"),
    )

    def __init__(self, config: DecoderConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        norms = [
            (f"layers.{layer}.norm", f"layers.{layer}.{'mlp_norm' if mixer == NONE else 'attn_norm'}")
            for layer, mixer in enumerate(config.mixers)
        ]
        names = [("mixer.up_proj", "mlp.up_proj"), ("mixer.down_proj", "mlp.down_proj")]
        stack = {name: self.weight_map.stack[name] for name in ("qkv_proj", "down_proj")}
        stack["up_proj"] = ("{i}.up_proj", "all.up_proj")
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
        heads, groups = read["mamba_num_heads"], read["n_groups"]
        count = len(types)
        return read_config(
            {**config, "num_hidden_layers": count, "rms_norm_eps": read["layer_norm_epsilon"]},
            rope=(None,) * count,
            mixers=tuple(_MIXERS.get(kind, NONE) for kind in types),
            mlps=tuple({"mlp": "squared_relu", "moe": "squared_relu_experts"}.get(kind, NONE) for kind in types),
            experts=_experts(read) if "moe" in types else None,
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


def _experts(read: ConfigReader) -> ExpertsConfig:
    read = ConfigReader(read, {"n_shared_experts": 1, "moe_shared_expert_intermediate_size": 7688})
    if read["n_shared_experts"] != 1:
        raise ModelError(f"n_shared_experts is {read['n_shared_experts']}; Nemotron-H has one, so it must be 1")
    found: ExpertsConfig = grouped_experts(
        {**read, "num_hidden_layers": 0, "mlp_layer_types": None}, norm_topk_prob=True
    )["experts"]
    shared, latent = read["moe_shared_expert_intermediate_size"], read.get("moe_latent_size")
    return replace(found, shared_width=shared, latent_width=latent)
