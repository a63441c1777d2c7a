"""MPNet: BERT without token types, whose scores of attention have a bias by distance, the same in all layers."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from quire.layers.biased_attention import by_distance
from quire.layers.scheme import Weight, as_tensor
from quire.layers.weights import WeightedLayer, empty_parameter
from quire.models.base import BuildContext
from quire.models.bert import read_encoder
from quire.models.config import ConfigReader
from quire.models.encoder import EMBEDDING_NAMES, Encoder, EncoderConfig

DEFAULTS = {"layer_norm_eps": 1e-12, "hidden_act": "gelu", "relative_attention_num_buckets": 32}
_FARTHEST = 128  # tokens from which on all distances are alike


class DistanceBias(WeightedLayer):
    """Of each head a bias for each bucket of distances."""

    def __init__(self, num_buckets: int, num_heads: int, max_model_len: int, ctx: BuildContext) -> None:
        super().__init__()
        self._shape, self._slice = (num_buckets, num_heads), ctx.group.slice_of(num_heads, "attention heads")
        self._longest = max_model_len
        self.weight = empty_parameter(num_buckets, self._slice[1], dtype=ctx.target.dtype)
        self._of_distances: Tensor | None = None  # [heads, 2 * longest - 1]

    def pieces(self, parameter: str) -> dict[str | None, tuple[int, ...]]:
        return {None: self._shape}

    def load(self, parameter: str, piece: str | None, weight: Weight) -> None:
        self.weight.data.copy_(as_tensor(weight).narrow(1, *self._slice))

    def make(self, query: Tensor, keys: Tensor) -> Tensor:
        """[heads, n, n] for a prompt of n tokens."""
        if self._of_distances is None:
            distances = torch.arange(1 - self._longest, self._longest)
            buckets = distance_buckets(distances, self._shape[0]).to(query.device)
            self._of_distances = self.weight.index_select(0, buckets).T.contiguous()
        return by_distance(self._of_distances, query.shape[1])


def distance_buckets(distances: Tensor, num_buckets: int) -> Tensor:
    """Half of the buckets for keys behind a query: near distances have one each, far ones share by logarithm."""
    half = num_buckets // 2
    near = half // 2
    size = distances.abs()
    far = near + ((size / near).log() / math.log(_FARTHEST / near) * (half - near)).long().clamp_max(half - 1 - near)
    return torch.where(size < near, size, far) + (distances > 0) * half


class MPNet(Encoder):
    prefix = "mpnet"
    outer: ClassVar = {
        "encoder.layer": "layers",
        "encoder.relative_attention_bias": "distance_bias",
        "embeddings": "embeddings",
    }
    classifier_layers: ClassVar = (("classifier.dense", "tanh"), ("classifier.out_proj", None))
    masked: ClassVar = ("lm_head.dense", "lm_head.layer_norm", "lm_head")
    names: ClassVar = {
        **EMBEDDING_NAMES,
        "attention.attn.q": "q_proj",
        "attention.attn.k": "k_proj",
        "attention.attn.v": "v_proj",
        "attention.attn.o": "o_proj",
        "attention.LayerNorm": "attn_norm",
        "intermediate.dense": "up_proj",
        "output.dense": "down_proj",
        "output.LayerNorm": "mlp_norm",
    }
    distance_bias: DistanceBias

    @classmethod
    def built(cls, config: dict[str, Any], ctx: BuildContext) -> Self:
        sizes = cls.encoder_config(config)
        buckets = ConfigReader(config, DEFAULTS)["relative_attention_num_buckets"]
        distance_bias = DistanceBias(buckets, sizes.num_heads, ctx.max_model_len, ctx)
        model = cls(sizes, ctx, distance_bias.make)
        model.distance_bias = distance_bias
        return model

    @classmethod
    def encoder_config(cls, config: dict[str, Any]) -> EncoderConfig:
        # Behind the position of padding, which is always 1.
        return read_encoder(ConfigReader(config, DEFAULTS), first_position=2)
