"""Next-token-prediction modules (MTP): a layer of the target's own checkpoint that drafts."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from quire.layers.attention import ForwardBatch
from quire.models.base import BuildContext
from quire.models.blocks import make_norm
from quire.models.config import DecoderConfig
from quire.models.decoder import DecoderLM
from quire.models.deepseek import DeepseekV3, DeepseekV32, Glm4MoeLite, GlmMoeDsa
from quire.models.dots1 import Glm4Moe
from quire.models.drafters.base import DraftHead, whole_linear
from quire.models.qwen3_next import Qwen3Next, Qwen35, Qwen35Moe

_OWN = ("eh_proj", "enorm", "hnorm", "shared_head.norm")  # beside the tensors of a decoder layer
_OF_LAYERS = ("mlp_layer_types", "layer_types", "indexer_types", "index_topk_freq", "index_topk_pattern")
_SHARED = ("layer.embed_tokens.weight", "layer.shared_head.head.weight")  # copies of the target's


class Mtp(DraftHead):
    """In the layout of DeepSeek-V3: one layer behind the target's last."""

    target: ClassVar[type[DecoderLM]] = DeepseekV3
    prefix = "model.layers.{num_layers}."

    def __init__(self, config: DecoderConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        own = [(f"layer.{name}", name.replace(".", "_")) for name in _OWN]
        self.weight_map = self.target.weight_map.renaming(*own).ignoring(*_SHARED)
        self.eh_proj = whole_linear(2 * config.hidden_size, config.hidden_size, ctx)
        self.enorm, self.hnorm, self.shared_head_norm = (make_norm(config, ctx) for _ in range(3))

    @classmethod
    def layer_config(cls, config: dict[str, Any]) -> DecoderConfig:
        one = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
        return cls.target.decoder_config({**config, **one, **dict.fromkeys(_OF_LAYERS)})

    def read(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        return self.joined(self.enorm(embeds), self.hnorm(hidden), self.eh_proj)

    def compute_logits(self, hidden: Tensor, whole: bool = True) -> Tensor:
        return self._target_logits(self.shared_head_norm(hidden), whole)


class Glm4MoeMtp(Mtp):
    target = Glm4Moe


class Glm4MoeLiteMtp(Mtp):
    target = Glm4MoeLite


class DeepseekV32Mtp(Mtp):
    target = DeepseekV32


class GlmMoeDsaMtp(Mtp):
    target = GlmMoeDsa


class Qwen3NextMtp(DraftHead):
    """Of Qwen3-Next and Qwen3.5: full attention, under `mtp.` in checkpoints."""

    target: ClassVar[type[Qwen3Next]] = Qwen3Next
    prefix = "mtp."

    def __init__(self, config: DecoderConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.weight_map = self.target.weight_map.renaming_first(("layer.layers.0", "layer")).renaming(
            *((f"layer.{name}", name) for name in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"))
        )
        self.fc = whole_linear(2 * config.hidden_size, config.hidden_size, ctx)
        self.norm, self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (make_norm(config, ctx) for _ in range(3))

    @classmethod
    def layer_config(cls, config: dict[str, Any]) -> DecoderConfig:
        return cls.target.decoder_config({**config, "num_hidden_layers": 1, "layer_types": ["full_attention"]})

    def read(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        return self.joined(self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden), self.fc)

    def run_layer(self, hidden: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        normed: Tensor = self.norm(super().run_layer(hidden, positions, batch))
        return normed


class Qwen35Mtp(Qwen3NextMtp):
    target = Qwen35


class Qwen35MoeMtp(Qwen3NextMtp):
    target = Qwen35Moe
