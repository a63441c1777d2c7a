"""ModernBERT: norms before attention and MLP, rotated positions, most layers with a window on both sides."""

from __future__ import annotations

from typing import Any, ClassVar

from quire.models.config import ConfigReader, DecoderConfig, read_config
from quire.models.encoder import EncoderConfig, check_supported
from quire.models.rotary_encoder import RotaryEncoder
from quire.types.pooling import Classifier, HeadLayer
from quire.types.sampling import PoolingKind

DEFAULTS: dict[str, Any] = {
    "hidden_activation": "gelu",
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_pooling": "cls",
    "norm_eps": 1e-5,
    "norm_bias": False,
    "local_attention": 128,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160_000.0,
    "local_rope_theta": 10_000.0,
}


class ModernBert(RotaryEncoder):
    prefix = "model"
    outer: ClassVar = {
        "embeddings.tok_embeddings": "stack.embed_tokens",
        "embeddings.norm": "stack.embedding_norm",
        "layers": "stack.layers",
        "final_norm": "stack.norm",
    }
    classifier_layers = token_classifier_layers = (("head.dense", "gelu"), ("classifier", None))
    masked: ClassVar = ("head.dense", "head.norm", "decoder")
    names: ClassVar = {
        "attn.Wqkv": "self_attn.qkv_proj",
        "attn.Wo": "self_attn.o_proj",
        "mlp.Wi": "mlp.gate_up_proj",
        "mlp.Wo": "mlp.down_proj",
    }

    @classmethod
    def stack_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, DEFAULTS)
        every = read["global_attn_every_n_layers"]
        rope = {
            "full_attention": {"rope_type": "default", "rope_theta": read["global_rope_theta"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": read["local_rope_theta"]},
        }
        layers = range(read["num_hidden_layers"])
        given = {
            "layer_types": ["sliding_attention" if layer % every else "full_attention" for layer in layers],
            "rope_parameters": rope,
            **{key: value for key, value in config.items() if value is not None},
            "sliding_window": read["local_attention"] // 2 + 1,
        }
        norms = {"layer_norms": True, "norm_bias": read["norm_bias"], "norm_eps": read["norm_eps"]}
        flags = {**norms, "causal": False, "embedding_norm": True}
        return read_config(given, defaults=DEFAULTS, is_sliding=lambda layer: layer % every != 0, **flags)

    @classmethod
    def encoder_config(cls, config: dict[str, Any]) -> EncoderConfig:
        read, stack = ConfigReader(config, DEFAULTS), cls.stack_config(config)
        check_supported(config, read["hidden_activation"])
        return EncoderConfig(
            vocab_size=stack.vocab_size,
            hidden_size=stack.hidden_size,
            intermediate_size=stack.intermediate_size,
            num_layers=stack.num_layers,
            num_heads=stack.num_heads,
            num_positions=stack.max_position_embeddings,
            norm_eps=read["norm_eps"],
        )

    @classmethod
    def classifier(cls, config: dict[str, Any]) -> Classifier | None:
        found = super().classifier(config)
        if found is None:
            return None
        return Classifier(found.kind, (cls._first_layer(config, found.layers[0]), *found.layers[1:]))

    @classmethod
    def token_head(cls, config: dict[str, Any]) -> tuple[HeadLayer, ...]:
        layers = super().token_head(config)
        return (cls._first_layer(config, layers[0]), *layers[1:]) if layers else ()

    @classmethod
    def _first_layer(cls, config: dict[str, Any], layer: HeadLayer) -> HeadLayer:
        """What all its heads begin with."""
        read = ConfigReader(config, DEFAULTS)
        check_supported(config, read["classifier_activation"])
        return HeadLayer(
            layer.source,
            layer.in_size,
            layer.out_size,
            bias=read["classifier_bias"],
            activation="gelu",
            norm="head.norm",
            norm_eps=read["norm_eps"],
            norm_bias=read["norm_bias"],
        )

    @classmethod
    def classified(cls, config: dict[str, Any]) -> PoolingKind:
        pooling: PoolingKind = ConfigReader(config, DEFAULTS)["classifier_pooling"]
        return pooling
