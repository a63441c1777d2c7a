"""EAGLE, EAGLE-2 and EAGLE-3: a decoder layer over hidden states of the target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quire.layers.attention import ForwardBatch
from quire.layers.embedding import HeadProjection, LMHead
from quire.layers.fusion import whole
from quire.layers.linear import QKVParallelLinear
from quire.layers.norm import ResidualMerge
from quire.layers.weights import WeightedLayer
from quire.models.base import BuildContext
from quire.models.blocks import AttentionBlock, make_norm
from quire.models.config import DecoderConfig
from quire.models.decoder import PRE_NORM_WEIGHTS
from quire.models.drafters.base import DraftHead, whole_linear
from quire.models.llama import Llama
from quire.ops.select import GATHER_ROWS
from quire.ops.step import SPREAD_LOGITS
from quire.types.errors import ConfigError

# Heads are published with and without the prefix, and some with a copy of the target's embeddings.
WEIGHTS = replace(PRE_NORM_WEIGHTS, rename={"model.layers": "layers", "layers.0": "layer", **PRE_NORM_WEIGHTS.rename})


class Eagle(DraftHead):
    """EAGLE and EAGLE-2: extrapolates the target's last hidden states, under the target's LM head."""

    weight_map = WEIGHTS.renaming(("model.fc", "fc")).ignoring("*embed_tokens.weight", "lm_head.weight")

    def __init__(self, config: DecoderConfig, ctx: BuildContext, *, fc_bias: bool) -> None:
        super().__init__(config, ctx)
        self.layer.attn_norm = ResidualMerge()  # what it reads is not normed
        self.fc = whole_linear(2 * config.hidden_size, config.hidden_size, ctx, bias=fc_bias)

    @classmethod
    def from_config(cls, config: dict[str, Any], ctx: BuildContext) -> Eagle:
        return cls(cls.layer_config(config), ctx, fc_bias=bool(config.get("fc_bias", True)))

    @classmethod
    def layer_config(cls, config: dict[str, Any]) -> DecoderConfig:
        return Llama.decoder_config({**config, "num_hidden_layers": 1})

    def read(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        return self.joined(embeds, hidden, self.fc)


_NAMES = (
    ("midlayer", "layer"),
    ("layer.hidden_norm", "hidden_norm"),
    ("model.norm", "norm"),
    ("model.fc", "fc"),
    ("lm_head", "lm_head.projection"),
    ("d2t", "draft_tokens.offsets"),
)


class DraftTokens(WeightedLayer):
    """The token of the target that each of a smaller vocabulary is: its number plus an offset."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.offsets = torch.nn.Parameter(torch.zeros(size, dtype=torch.int64), requires_grad=False)


class Eagle3(DraftHead):
    """EAGLE-3: reads three of the target's layers, with an LM head over a smaller vocabulary."""

    weight_map = WEIGHTS.renaming(*_NAMES).ignoring("*embed_tokens.weight", "t2d")

    def __init__(
        self, config: DecoderConfig, ctx: BuildContext, draft_vocab_size: int, taps: tuple[int, ...]
    ) -> None:
        super().__init__(config, ctx)
        self.taps, self.num_hidden_read, self._vocab_size = taps, len(taps), config.vocab_size
        attention, width = self.layer.self_attn, config.hidden_size
        assert isinstance(attention, AttentionBlock)
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        attention.qkv_proj = QKVParallelLinear(2 * width, *heads, bias=config.qkv_bias, **ctx.split)
        self.hidden_norm, self.norm = make_norm(config, ctx), make_norm(config, ctx)
        self.fc = whole_linear(len(taps) * width, width, ctx)
        self._spread, self._gather_rows = SPREAD_LOGITS.bind(ctx.target), GATHER_ROWS.bind(ctx.target)
        self.draft_tokens = DraftTokens(draft_vocab_size) if draft_vocab_size < config.vocab_size else None
        projection = HeadProjection(width, draft_vocab_size, bias=False, **ctx.split)
        self.lm_head = LMHead(projection, **ctx.split)

    @classmethod
    def from_config(cls, config: dict[str, Any], ctx: BuildContext) -> Eagle3:
        layer = cls.layer_config(config)
        return cls(layer, ctx, config.get("draft_vocab_size") or layer.vocab_size, tuple(config["taps"]))

    @classmethod
    def layer_config(cls, config: dict[str, Any]) -> DecoderConfig:
        return Llama.decoder_config({**config, "num_hidden_layers": 1})

    def forward(
        self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """`inputs_embeds` are the target's hidden states or, at its drafts, its own, which are narrower."""
        assert inputs_embeds is not None
        hidden = inputs_embeds if inputs_embeds.shape[-1] == self.hidden_size else whole(self.fc(inputs_embeds))
        assert self.layer.self_attn is not None
        assert self.layer.mlp is not None
        rotation = None if self.rotary is None else self.rotary(positions)
        both = self._join(self.layer.attn_norm(self._embed(input_ids)), self.hidden_norm(hidden))
        attended, wanted = self.layer.self_attn(both, rotation, batch), batch.wanted
        before = hidden if wanted is None else self._gather_rows(hidden, wanted.tokens)
        mixed, residual = self.layer.mlp_norm.merge(attended, before)
        return self._add(whole(self.layer.mlp(mixed)), whole(residual), None)

    def compute_logits(self, hidden: Tensor, whole: bool = True) -> Tensor:
        assert whole, "tokens that the head leaves out have no rank"
        logits: Tensor = self.lm_head(self.norm(hidden))
        if self.draft_tokens is None:
            return logits
        return self._spread(logits, self.draft_tokens.offsets, self._vocab_size)


def tapped_layers(config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Layers of the target that a head reads the inputs of, as its config says or as published heads have it."""
    named = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    taps = tuple(named or (2, num_layers // 2, num_layers - 3))
    if len(taps) < 2 or not all(0 <= layer < num_layers for layer in taps):
        raise ConfigError(
            f"speculative_config: the head reads layers {taps} of its target, which has {num_layers};"
            " give a head of several layers that was trained for this target"
        )
    return taps
