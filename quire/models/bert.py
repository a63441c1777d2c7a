"""BERT and its nearest relatives, RoBERTa and DistilBERT: learned positions, norms behind attention and MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Self

from quire.models.base import BuildContext
from quire.models.config import ConfigReader
from quire.models.encoder import (
    ACTIVATIONS,
    EMBEDDING_NAMES,
    ClassifierLayers,
    Encoder,
    EncoderConfig,
    check_supported,
)

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
    """BERT: learned positions and token types, norms behind attention and MLP."""

    prefix = "bert"
    outer: ClassVar = {"encoder.layer": "layers", "embeddings": "embeddings"}
    classifier_layers: ClassVar[ClassifierLayers] = (("bert.pooler.dense", "tanh"), ("classifier", None))
    masked: ClassVar = ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions")
    names: ClassVar = {
        **EMBEDDING_NAMES,
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


class ColBert(Bert):
    """ColBERT as it was published: BERT below a projection of each token (`linear`)."""

    @classmethod
    def from_config(cls, config: dict[str, Any], ctx: BuildContext) -> Self:
        model = super().from_config(config, ctx)
        if not ctx.heads:
            model.weight_map = model.weight_map.ignoring("linear.weight")
        return model


class Roberta(Bert):
    """RoBERTa and XLM-RoBERTa: BERT whose positions are counted from behind that of padding."""

    prefix = "roberta"
    classifier_layers: ClassVar = (("classifier.dense", "tanh"), ("classifier.out_proj", None))
    masked: ClassVar = ("lm_head.dense", "lm_head.layer_norm", "lm_head")

    @classmethod
    def encoder_config(cls, config: dict[str, Any]) -> EncoderConfig:
        read = ConfigReader(config, {"pad_token_id": 1})
        return replace(super().encoder_config(config), first_position=read["pad_token_id"] + 1)


class DistilBert(Encoder):
    """DistilBERT: BERT without token types, under names of its own."""

    prefix = "distilbert"
    outer: ClassVar = {"transformer.layer": "layers", "embeddings": "embeddings"}
    classifier_layers: ClassVar = (("pre_classifier", "relu"), ("classifier", None))
    masked: ClassVar = ("vocab_transform", "vocab_layer_norm", "vocab_projector")
    names: ClassVar = {
        **EMBEDDING_NAMES,
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
        berts = {
            **{"dim": "hidden_size", "hidden_dim": "intermediate_size", "activation": "hidden_act"},
            **{"n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"},
        }
        return read_encoder(ConfigReader({berts.get(key, key): config[key] for key in config}, DEFAULTS))
