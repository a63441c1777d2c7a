"""Next-token-prediction modules (MTP) in the layout of DeepSeek-V3: one layer behind the target's last."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from quire.layers.attention import ForwardBatch
from quire.models.base import BuildContext
from quire.models.blocks import make_norm
from quire.models.config import DecoderConfig
from quire.models.decoder import DecoderLM
from quire.models.deepseek_v3 import DeepseekV3
from quire.models.drafters.base import DraftHead, whole_linear
from quire.models.glm4_moe import Glm4Moe

_OWN = ("eh_proj", "enorm", "hnorm", "shared_head.norm")  # beside the tensors of a decoder layer
_SHARED = ("layer.embed_tokens.weight", "layer.shared_head.head.weight")  # copies of the target's


class Mtp(DraftHead):
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
        one = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_layer_types": None, "layer_types": None}
        return cls.target.decoder_config({**config, **one})

    def forward(
        self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        assert inputs_embeds is not None, "of a head, these are the hidden states before the tokens"
        both = self.joined(self.enorm(self._embed(input_ids)), self.hnorm(inputs_embeds), self.eh_proj)
        return self.run_layer(both, positions, batch)

    def compute_logits(self, hidden: Tensor, whole: bool = True) -> Tensor:
        return self._target_logits(self.shared_head_norm(hidden), whole)


class Glm4MoeMtp(Mtp):
    target = Glm4Moe
