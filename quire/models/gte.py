"""GTE and Jina v3: BERT with rotated positions, GTE with a gated MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from quire.layers.rope.parameters import rope_parameters
from quire.models.bert import Bert, Roberta
from quire.models.config import ConfigReader
from quire.models.encoder import EMBEDDING_NAMES, GATES, EncoderConfig, check_supported
from quire.models.nomic_bert import NomicBert
from quire.types.errors import ModelError

# What the published code of GTE does in ways that are not here, and what each key must be.
PLAIN = {"position_embedding_type": "rope", "layer_norm_type": "layer_norm", "logn_attention_scale": False}


class JinaEmbeddingsV3(Bert):
    prefix = "roberta"
    outer = NomicBert.outer
    classifier_layers: ClassVar = Roberta.classifier_layers
    masked: ClassVar = Roberta.masked
    names: ClassVar = {**NomicBert.names, "mixer.Wqkv": "qkv_proj", "mixer.out_proj": "o_proj", "mlp.fc1": "up_proj"}
    theta: ClassVar = 20_000.0

    @classmethod
    def encoder_config(cls, config: dict[str, Any]) -> EncoderConfig:
        found = super().encoder_config(config)
        rope = rope_parameters(dict(ConfigReader(config, {"rope_theta": cls.theta})), found.head_dim)
        return replace(found, has_positions=False, rope=rope)


class Gte(JinaEmbeddingsV3):
    prefix = "gte"
    classifier_layers: ClassVar = (("gte.pooler.dense", "tanh"), ("classifier", None))
    masked: ClassVar = ("lm_head.dense", "lm_head.norm", "lm_head.decoder")
    outer = Bert.outer
    names: ClassVar = {
        **EMBEDDING_NAMES,
        **{f"attention.{part}_proj": f"{part}_proj" for part in ("qkv", "q", "k", "v", "o")},
        "mlp.up_gate_proj": "gate_up_proj",
        "mlp.down_proj": "down_proj",
        "attn_ln": "attn_norm",
        "mlp_ln": "mlp_norm",
    }
    theta: ClassVar = 160_000.0

    @classmethod
    def encoder_config(cls, config: dict[str, Any]) -> EncoderConfig:
        gate = config.get("hidden_act", "gelu")
        for key, needed in PLAIN.items():
            if config.get(key) not in (None, needed):
                raise ModelError(f"{key} is {config[key]!r} in the config of a GTE encoder; known: {needed!r}")
        plain = {key: value for key, value in config.items() if key not in PLAIN}
        check_supported(plain, gate, GATES)
        found = super().encoder_config({"type_vocab_size": 1, **plain, "hidden_act": "gelu"})
        return replace(found, gate=gate, up_bias=False, up_first=True)


class NewGte(Gte):
    """GTE v1.5 and multilingual, under the names of the code that they were published with (`NewModel`)."""

    prefix = "new"
    classifier_layers: ClassVar = (("new.pooler.dense", "tanh"), ("classifier", None))
    theta: ClassVar = 10_000.0
