"""BERT: learned positions and token types, norms behind attention and MLP."""

from __future__ import annotations

from typing import Any, ClassVar

from quire.models.config import ConfigReader
from quire.models.encoder import ACTIVATIONS, Encoder, EncoderConfig, check_supported

DEFAULTS = {"layer_norm_eps": 1e-12, "hidden_act": "gelu", "type_vocab_size": 2}


def read_encoder(read: ConfigReader, **fields: Any) -> EncoderConfig:
    """By BERT's keys; `fields` are those that an architecture sets itself."""
    check_supported(dict(read), read["hidden_act"], ACTIVATIONS)
    return EncoderConfig(
        vocab_size=read["vocab_size"],
        hidden_size=read["hidden_size"],
        intermediate_size=read["intermediate_size"],
        num_layers=read["num_hidden_layers"],
        num_heads=read["num_attention_heads"],
        num_positions=read["max_position_embeddings"],
        norm_eps=read["layer_norm_eps"],
        activation=read["hidden_act"],
        **fields,
    )


class Bert(Encoder):
    prefix = "bert"
    outer: ClassVar = {"encoder.layer": "layers", "embeddings": "embeddings"}
    classifiers: ClassVar = {
        "ForSequenceClassification": (("bert.pooler.dense", "tanh"), ("classifier", None)),
        "ForTokenClassification": (("classifier", None),),
    }
    masked: ClassVar = ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions")
    names: ClassVar = {
        "word_embeddings": "words",
        "position_embeddings": "positions",
        "token_type_embeddings": "types",
        "embeddings.LayerNorm": "embeddings.norm",
        "attention.self.query": "q_proj",
        "attention.self.key": "k_proj",
        "attention.self.value": "v_proj",
        "attention.output.dense": "o_proj",
        "attention.output.LayerNorm": "attn_norm",
        "intermediate.dense": "up_proj",
        "output.dense": "down_proj",
        "output.LayerNorm": "mlp_norm",
    }

    @classmethod
    def encoder_config(cls, config: dict[str, Any]) -> EncoderConfig:
        read = ConfigReader(config, DEFAULTS)
        return read_encoder(read, num_token_types=read["type_vocab_size"])
