"""Falcon-H1: attention and Mamba-2 side by side in each layer, and multipliers nearly everywhere."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from quire.attention.base import Rotation
from quire.layers.activation import gated_activation
from quire.layers.attention import ForwardBatch
from quire.layers.fusion import ROWS, Forms, Passed, on_rows, whole
from quire.models.bamba import mamba2_sizes
from quire.models.base import BuildContext
from quire.models.blocks import AttentionBlock, GatedMLP
from quire.models.config import ConfigReader, DecoderConfig, read_config
from quire.models.decoder import PRE_NORM_WEIGHTS, DecoderLM
from quire.models.kinds import Mixer
from quire.models.mamba import BEHIND_MIXER, MAMBA_NAMES
from quire.models.mamba_mixers import Mamba2Mixer
from quire.models.recurrent import recurrent_of
from quire.types.cache import LayerKV

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


class BesideAttention(Mixer):
    """The sum of both, each times its multiplier."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__(config, ctx, layer)
        self.mamba = Mamba2Mixer(config, ctx, layer)
        self.attn = AttentionBlock(config, ctx, layer)
        self._scales = recurrent_of(config).beside

    def feed(self, accepted: Forms) -> None:
        self.mamba.feed(accepted & ROWS)
        self.attn.feed(accepted & ROWS)

    @classmethod
    def keeps_all(cls, config: DecoderConfig, layer: int) -> tuple[LayerKV, ...]:
        return *Mamba2Mixer.keeps_all(config, layer), *AttentionBlock.keeps_all(config, layer)

    def forward(self, hidden: Passed, rotation: Rotation, batch: ForwardBatch) -> Passed:
        x, wanted = whole(hidden), batch.wanted
        of_states, of_attention = self._scales
        with nullcontext() if batch.adapters is None else batch.adapters.narrowing_for_now():
            mixed = self.mamba(x, rotation, batch)
        finite = None if wanted is None else wanted.finite.clone()
        attended = self.attn(x, rotation, batch)
        if wanted is not None and finite is not None:
            wanted.finite.logical_and_(finite)
        return on_rows(lambda first, second: first * of_states + second * of_attention, mixed, attended)


class ScaledMLP(GatedMLP):
    """down(silu(gate(x) * a) * up(x)) * b."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__(config, ctx, layer)
        self._factors = recurrent_of(config).mlp
        self._act = gated_activation(config.activation, ctx.target)

    def settle(self) -> None:
        return None

    def forward(self, hidden: Passed) -> Passed:
        of_gates, of_results = self._factors
        gate, up = whole(self.gate_up_proj(hidden)).chunk(2, dim=-1)
        down = self.down_proj(self._act(torch.cat((gate * of_gates, up), dim=-1)))
        return on_rows(lambda given: given * of_results, down)


class FalconH1(DecoderLM):
    weight_map = PRE_NORM_WEIGHTS.renaming(
        *((f"self_attn.{name}", f"self_attn.attn.{name}") for name in _ATTENTION),
        *((f"mamba.{name}", f"self_attn.mamba.{'gated_norm' if name == 'norm' else name}") for name in MAMBA_NAMES),
        *BEHIND_MIXER,
    )

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {"mlp_multipliers": (1.0, 1.0), "ssm_multipliers": (1.0,) * 5})

        def factor(name: str) -> float:
            return float(read.get(name, 1.0))

        # Queries and keys are both of the scaled input, so scores are scaled by its square.
        entry, count = factor("attention_in_multiplier"), read["num_hidden_layers"]
        base = read_config(
            config,
            defaults={"rms_norm_eps": 1e-5},
            mixers=("beside_attention",) * count,
            mlps=("scaled",) * count,
            embedding_scale=factor("embedding_multiplier"),
            logit_divisor=1.0 / factor("lm_head_multiplier"),
        )
        sizes = replace(
            mamba2_sizes(read),
            norm=read.flag("mamba_rms_norm"),
            norm_first=bool(read.get("mamba_norm_before_gate", True)),
            scales=tuple(float(scale) * factor("ssm_in_multiplier") for scale in read["ssm_multipliers"]),
            beside=(factor("ssm_out_multiplier"), entry * factor("attention_out_multiplier")),
            mlp=tuple(map(float, read["mlp_multipliers"])),
        )
        scale = base.attention_scale * entry * entry * factor("key_multiplier")
        return replace(base, attention_scale=scale, recurrent=sizes)
