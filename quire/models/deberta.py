"""DeBERTa-v2 and v3: BERT whose scores of attention also compare tokens with embeddings of distances."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar, Self

from torch import Tensor

from quire.layers.biased_attention import BiasedAttention, DistanceEmbeddings, distance_rows
from quire.layers.norm import LayerNorm
from quire.models.base import BuildContext
from quire.models.bert import Bert
from quire.models.config import ConfigReader
from quire.models.encoder import Encoder, EncoderConfig, EncoderLayer, Table
from quire.types.errors import ModelError
from quire.types.ledger import EngineSizes, LedgerLine

DEFAULTS: dict[str, Any] = {
    "layer_norm_eps": 1e-7,
    "hidden_act": "gelu",
    "type_vocab_size": 0,
    "relative_attention": False,
    "max_relative_positions": -1,
    "position_buckets": -1,
    "pooler_hidden_act": "gelu",
    "position_biased_input": True,
    "norm_rel_ebd": "none",
}
# Keys of the config, and the only value of each that is computed here.
NEEDED = {"relative_attention": True, "share_att_key": True, "conv_kernel_size": 0, "pooler_hidden_act": "gelu"}


class DebertaV2(Bert):
    prefix = "deberta"
    outer: ClassVar = {
        "encoder.layer": "layers",
        "encoder.rel_embeddings": "distances",
        "encoder.LayerNorm": "distance_norm",
        "embeddings": "embeddings",
    }
    classifier_layers: ClassVar = (("pooler.dense", "gelu"), ("classifier", None))
    names: ClassVar = {
        **Bert.names,
        "attention.self.query_proj": "q_proj",
        "attention.self.key_proj": "k_proj",
        "attention.self.value_proj": "v_proj",
    }

    def __init__(self, sizes: EncoderConfig, ctx: BuildContext, config: dict[str, Any]) -> None:
        read = ConfigReader(config, DEFAULTS)
        Encoder.__init__(self, sizes, ctx, _unset)
        span, farthest = _span(config)
        self.distances = Table(2 * span, sizes.hidden_size, ctx.target)
        self.distance_norm: LayerNorm | None = None
        if "layer_norm" in str(read["norm_rel_ebd"]).lower():
            self.distance_norm = LayerNorm(sizes.hidden_size, eps=sizes.norm_eps, target=ctx.target)
        rows = distance_rows(ctx.max_model_len, span, read["position_buckets"], farthest)
        kinds, self._projected_rows = _kinds(config), 2 * span
        for layer in self.layers:
            assert isinstance(layer, EncoderLayer)
            assert isinstance(layer.attention, BiasedAttention)
            embeddings = DistanceEmbeddings(layer.qkv_proj, self.distances.weight, self.distance_norm, kinds)
            embeddings.buckets = rows
            layer.attention.make_bias = embeddings.make

    @classmethod
    def built(cls, config: dict[str, Any], ctx: BuildContext) -> Self:
        return cls(cls.encoder_config(config), ctx, config)

    @classmethod
    def encoder_config(cls, config: dict[str, Any]) -> EncoderConfig:
        read = ConfigReader(config, {**DEFAULTS, "conv_kernel_size": 0, "share_att_key": False})
        for key, needed in NEEDED.items():
            if read[key] != needed:
                raise ModelError(f"{key} is {read[key]!r} in the config of a DeBERTa encoder; known: {needed!r}")
        if read.get("embedding_size") not in (None, read["hidden_size"]):
            raise ModelError("embedding_size is not hidden_size in the config of a DeBERTa encoder; known: the same")
        found = super().encoder_config({**DEFAULTS, **config})
        scale = (found.head_dim * (1 + len(_kinds(config)))) ** -0.5
        return replace(found, has_positions=bool(read["position_biased_input"]), score_scale=scale)

    def contributes(self, sizes: EngineSizes) -> Iterable[LedgerLine]:
        yield from super().contributes(sizes)
        num_bytes = 2 * self._projected_rows * sizes.hidden_size * len(self.layers) * self.distances.weight.itemsize
        yield LedgerLine("distances", num_bytes, "projected once by each layer")


def _unset(query: Tensor, keys: Tensor) -> Tensor:
    raise AssertionError("each layer has its own embeddings of distances")


def _kinds(config: dict[str, Any]) -> tuple[str, ...]:
    """Which of tokens and distances are compared: c2p, p2c."""
    given = config.get("pos_att_type") or ()
    return tuple(given.split("|")) if isinstance(given, str) else tuple(given)


def _span(config: dict[str, Any]) -> tuple[int, int]:
    """(half of the rows of distances, the farthest distance)."""
    read = ConfigReader(config, DEFAULTS)
    farthest = read["max_relative_positions"]
    farthest = read["max_position_embeddings"] if farthest < 1 else farthest
    return (read["position_buckets"] if read["position_buckets"] > 0 else farthest), farthest
