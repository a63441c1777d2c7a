"""Next-token-prediction modules (MTP): a layer of the target's own checkpoint that drafts."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, Self, cast

from torch import Tensor

from quire.layers.attention import ForwardBatch
from quire.layers.weights import WeightMap
from quire.models.base import BuildContext
from quire.models.blocks import make_norm
from quire.models.config import DecoderConfig
from quire.models.decoder import DecoderLM
from quire.models.deepseek import LATENT_EXPERTS
from quire.models.drafters.base import DraftHead, whole_linear
from quire.models.longcat_flash import LongcatFlash
from quire.models.registry import model_class

_OWN = ("eh_proj", "enorm", "hnorm", "shared_head.norm")  # beside the tensors of a decoder layer
_OF_LAYERS = ("mlp_layer_types", "layer_types", "indexer_types", "index_topk_freq", "index_topk_pattern")
_SHARED = ("layer.embed_tokens.weight", "layer.shared_head.head.weight")  # copies of the target's
_LONGCAT = {"layer.layers.0": "layer", "layer.transformer_layer": "layer", "layer.norm": "layer.shared_head.norm"}
_LONGCAT |= {f"layer.{name}.m": f"layer.{name}" for name in ("enorm", "hnorm")}


class TargetsModule(DraftHead):
    """Its tensors are beside the target's, whose class says what its layer is."""

    @classmethod
    @abstractmethod
    def names(cls, target: WeightMap) -> WeightMap:
        """Those of the module, where the target's layers have `target`."""

    @classmethod
    def target(cls, config: dict[str, Any]) -> type[DecoderLM]:
        return cast("type[DecoderLM]", model_class(config))

    @classmethod
    def from_config(cls, config: dict[str, Any], ctx: BuildContext) -> Self:
        head = super().from_config(config, ctx)
        head.weight_map = cls.names(cls.target(config).weight_map)
        return head


class Mtp(TargetsModule):
    """In the layout of DeepSeek-V3: one layer behind the target's last."""

    prefix = "model.layers.{num_layers}."

    def __init__(self, config: DecoderConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.eh_proj = whole_linear(2 * config.hidden_size, config.hidden_size, ctx)
        self.enorm, self.hnorm, self.shared_head_norm = (make_norm(config, ctx) for _ in range(3))

    @classmethod
    def names(cls, target: WeightMap) -> WeightMap:
        return target.renaming(*((f"layer.{name}", name.replace(".", "_")) for name in _OWN)).ignoring(*_SHARED)

    @classmethod
    def layer_config(cls, config: dict[str, Any]) -> DecoderConfig:
        one = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
        return cls.target(config).decoder_config({**config, **one, **dict.fromkeys(_OF_LAYERS)})

    def read(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        return self.joined(self.enorm(embeds), self.hnorm(hidden), self.eh_proj)

    def compute_logits(self, hidden: Tensor, whole: bool = True) -> Tensor:
        return self._target_logits(self.shared_head_norm(hidden), whole)


class LongcatMtp(Mtp):
    """Of LongCat-Flash: a layer with one attention and one MLP, under `model.mtp.` in checkpoints."""

    prefix = "model.mtp."

    @classmethod
    def names(cls, target: WeightMap) -> WeightMap:
        return super().names(LATENT_EXPERTS).renaming_first(*_LONGCAT.items())

    @classmethod
    def layer_config(cls, config: dict[str, Any]) -> DecoderConfig:
        whole = LongcatFlash.decoder_config({**config, "num_layers": 1})
        return replace(whole, mixers=("latent",), mlps=("gated",), experts=None)


class Qwen3NextMtp(TargetsModule):
    """Of Qwen3-Next and Qwen3.5: full attention, under `mtp.` in checkpoints."""

    prefix = "mtp."

    def __init__(self, config: DecoderConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.fc = whole_linear(2 * config.hidden_size, config.hidden_size, ctx)
        self.norm, self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (make_norm(config, ctx) for _ in range(3))

    @classmethod
    def names(cls, target: WeightMap) -> WeightMap:
        own = ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        return target.renaming_first(("layer.layers.0", "layer")).renaming(*((f"layer.{name}", name) for name in own))

    @classmethod
    def layer_config(cls, config: dict[str, Any]) -> DecoderConfig:
        one = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        return cls.target(config).decoder_config({**config, **one})

    def read(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        return self.joined(self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden), self.fc)

    def run_layer(self, hidden: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        normed: Tensor = self.norm(super().run_layer(hidden, positions, batch))
        return normed
