"""Nomic BERT: BERT with rotated positions and a gated MLP, or experts. Checkpoints have one of two sets of names."""

from __future__ import annotations

from typing import Any, ClassVar

from quire.layers.rope.parameters import rope_parameters
from quire.models.config import ConfigReader
from quire.models.encoder import EMBEDDING_NAMES, Encoder, EncoderConfig, EncoderLayer
from quire.models.nomic_experts import NomicExpertsLayer, read_activation, read_experts
from quire.types.errors import ModelError
from quire.types.pooling import HeadLayer

DEFAULTS: dict[str, Any] = {
    **{"type_vocab_size": 2, "hidden_act": "silu", "rope_theta": 1000.0, "layer_norm_eps": 1e-12},
    "moe_every_n_layers": 0,
}
# What the model's own code does in ways that are not here, and what each key must be.
PLAIN: dict[str, Any] = {
    "prenorm": False,
    "use_rms_norm": False,
    "rotary_emb_interleaved": False,
    "rotary_emb_fraction": 1.0,
    "num_shared_experts": 0,
    "expert_choice_router": False,
    "moe_normalize_expert_weights": False,
}
# Keys of the model's own code, and what they are called in transformers.
KEYS = {
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}


class NomicBert(Encoder):
    prefix = "nomic_bert"
    outer: ClassVar = {
        "encoder.layers": "layers",
        "layers": "layers",
        "emb_ln": "embeddings.norm",
        "embeddings": "embeddings",
    }
    classifier_layers: ClassVar = (("nomic_bert.pooler.dense", "tanh"), ("classifier", None))
    names: ClassVar = {
        **EMBEDDING_NAMES,
        "attn.Wqkv": "qkv_proj",
        "attn.out_proj": "o_proj",
        **{f"self_attn.{kind}_proj": f"{kind}_proj" for kind in "qkvo"},
        "mlp.fc1": "up_proj",
        "mlp.fc11": "up_proj",
        "mlp.fc12": "gate_proj",
        "mlp.fc2": "down_proj",
        "mlp.up_proj": "up_proj",
        "mlp.gate_proj": "gate_proj",
        "mlp.down_proj": "down_proj",
        "norm1": "attn_norm",
        "norm2": "mlp_norm",
        "post_attention_layernorm": "attn_norm",
        "post_mlp_layernorm": "mlp_norm",
        "mlp.router.layer": "router",
        "mlp.experts.mlp.w1": "experts.up_proj.weight",
        "mlp.experts.mlp.w2": "experts.down_proj.weight",
        "mlp.experts.bias": "experts.bias",
    }

    @classmethod
    def token_head(cls, config: dict[str, Any]) -> tuple[HeadLayer, ...]:
        return ()  # its activation is one that no head here has

    @classmethod
    def encoder_config(cls, config: dict[str, Any]) -> EncoderConfig:
        for key, needed in PLAIN.items():
            if config.get(key) not in (None, needed):
                raise ModelError(f"{key} is {config[key]!r} in the config of a Nomic encoder; known: {needed!r}")
        renamed = {KEYS.get(key, key): value for key, value in config.items()}
        longest = config.get("max_trained_positions") or config.get("n_positions")
        if longest is not None:
            renamed.setdefault("max_position_embeddings", longest)
        read = ConfigReader(renamed, DEFAULTS)
        biases = {read.flag("qkv_proj_bias"), read.flag("mlp_fc2_bias")}
        if len(biases) > 1:
            raise ModelError(
                "qkv_proj_bias and mlp_fc2_bias differ in the config of a Nomic encoder; known: both alike"
            )
        gate, activation = read_activation(read)
        heads, hidden = read["num_attention_heads"], read["hidden_size"]
        return EncoderConfig(
            vocab_size=read["vocab_size"],
            hidden_size=hidden,
            intermediate_size=read["intermediate_size"],
            num_layers=read["num_hidden_layers"],
            num_heads=heads,
            num_positions=read["max_position_embeddings"],
            num_token_types=read["type_vocab_size"],
            norm_eps=read["layer_norm_eps"],
            has_positions=False,
            rope=rope_parameters(dict(read), hidden // heads),
            gate=gate,
            activation=activation,
            bias=biases.pop(),
            up_bias=read.flag("mlp_fc1_bias"),
            experts=read_experts(read),
            experts_every=read["moe_every_n_layers"],
        )

    @classmethod
    def layer_kind(cls, config: EncoderConfig, layer: int) -> type[EncoderLayer]:
        every = config.experts_every
        return NomicExpertsLayer if config.experts and every and layer % every == 1 else EncoderLayer
