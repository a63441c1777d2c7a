"""The next-token-prediction module of Qwen3-Next and Qwen3.5: full attention, under `mtp.` in checkpoints."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from quire.layers.attention import ForwardBatch
from quire.models.base import BuildContext
from quire.models.blocks import make_norm
from quire.models.config import DecoderConfig
from quire.models.drafters.base import DraftHead, whole_linear
from quire.models.qwen3_5 import Qwen35, Qwen35Moe
from quire.models.qwen3_next import Qwen3Next


class Qwen3NextMtp(DraftHead):
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

    def forward(
        self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        assert inputs_embeds is not None, "of a head, these are the hidden states before the tokens"
        embeds, hidden = self.pre_fc_norm_embedding(self._embed(input_ids)), self.pre_fc_norm_hidden(inputs_embeds)
        normed: Tensor = self.norm(self.run_layer(self.joined(embeds, hidden, self.fc), positions, batch))
        return normed


class Qwen35Mtp(Qwen3NextMtp):
    target = Qwen35


class Qwen35MoeMtp(Qwen3NextMtp):
    target = Qwen35Moe
