"""DistilBERT: BERT without token types, under names of its own."""

from __future__ import annotations

from typing import Any, ClassVar

from quire.models.config import ConfigReader
from quire.models.encoder import ACTIVATIONS, Encoder, EncoderConfig, check_supported

DEFAULTS = {"activation": "gelu"}


class DistilBert(Encoder):
    prefix = "distilbert"
    outer: ClassVar = {"transformer.layer": "layers", "embeddings": "embeddings"}
    classifiers: ClassVar = {
        "ForSequenceClassification": (("pre_classifier", "relu"), ("classifier", None)),
        "ForTokenClassification": (("classifier", None),),
    }
    masked: ClassVar = ("vocab_transform", "vocab_layer_norm", "vocab_projector")
    names: ClassVar = {
        "word_embeddings": "words",
        "position_embeddings": "positions",
        "embeddings.LayerNorm": "embeddings.norm",
        "attention.q_lin": "q_proj",
        "attention.k_lin": "k_proj",
        "attention.v_lin": "v_proj",
        "attention.out_lin": "o_proj",
        "sa_layer_norm": "attn_norm",
        "ffn.lin1": "up_proj",
        "ffn.lin2": "down_proj",
        "output_layer_norm": "mlp_norm",
    }

    @classmethod
    def encoder_config(cls, config: dict[str, Any]) -> EncoderConfig:
        read = ConfigReader(config, DEFAULTS)
        check_supported(config, read["activation"], ACTIVATIONS)
        return EncoderConfig(
            vocab_size=read["vocab_size"],
            hidden_size=read["dim"],
            intermediate_size=read["hidden_dim"],
            num_layers=read["n_layers"],
            num_heads=read["n_heads"],
            num_positions=read["max_position_embeddings"],
            activation=read["activation"],
        )
