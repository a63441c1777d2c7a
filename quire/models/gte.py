"""GTE and Jina v3, as transformers names them: BERT with rotated positions, the first of them with a gated MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from quire.layers.rope.parameters import rope_parameters
from quire.models.bert import Bert
from quire.models.config import ConfigReader
from quire.models.encoder import GATES, EncoderConfig, check_supported
from quire.models.nomic_bert import NomicBert
from quire.models.roberta import Roberta


class JinaEmbeddingsV3(Bert):
    prefix = "roberta"
    outer = NomicBert.outer
    classifiers = Roberta.classifiers
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
    classifiers: ClassVar = {
        "ForSequenceClassification": (("gte.pooler.dense", "tanh"), ("classifier", None)),
        "ForTokenClassification": (("classifier", None),),
    }
    masked: ClassVar = ("lm_head.dense", "lm_head.norm", "lm_head.decoder")
    outer = Bert.outer
    names: ClassVar = {
        "word_embeddings": "words",
        "token_type_embeddings": "types",
        "embeddings.LayerNorm": "embeddings.norm",
        "attention.qkv_proj": "qkv_proj",
        "attention.o_proj": "o_proj",
        "mlp.up_gate_proj": "gate_up_proj",
        "mlp.down_proj": "down_proj",
        "attn_ln": "attn_norm",
        "mlp_ln": "mlp_norm",
    }
    theta: ClassVar = 160_000.0

    @classmethod
    def encoder_config(cls, config: dict[str, Any]) -> EncoderConfig:
        gate = config.get("hidden_act", "gelu")
        check_supported(config, gate, GATES)
        found = super().encoder_config({"type_vocab_size": 1, **config, "hidden_act": "gelu"})
        return replace(found, gate=gate, up_bias=False, up_first=True)
