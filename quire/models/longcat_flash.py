"""LongCat-Flash: layers of two latent attentions and two MLPs, and experts beside the second half of each."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quire.attention.base import Rotation
from quire.layers.attention import ForwardBatch
from quire.layers.fusion import ROWS, Forms, Passed, Stage, Stream, on_rows, whole
from quire.models.base import BuildContext
from quire.models.blocks import DecoderLayer
from quire.models.config import ConfigReader, DecoderConfig, ExpertsConfig
from quire.models.decoder import DecoderLM
from quire.models.deepseek import LATENT_EXPERTS
from quire.models.experts import ExpertsMLP
from quire.models.latent import LatentBlock, read_latent
from quire.ops.grouped import ADD_SHARED
from quire.ops.routing import Routing
from quire.ops.select import GATHER_ROWS
from quire.types.cache import LayerKV
from quire.types.errors import ModelError

_HALVES = {**{name: name for name in ("self_attn", "input_layernorm", "post_attention_layernorm")}, "mlps": "mlp"}
_FIXED = {"zero_expert_type": "identity", "mla_scale_q_lora": True, "mla_scale_kv_lora": True}


class LatentPair(LatentBlock):
    @classmethod
    def keeps_all(cls, config: DecoderConfig, layer: int) -> tuple[LayerKV, ...]:
        return super().keeps_all(config, layer) * 2


class FirstHalf(DecoderLayer):
    """Its MLP and the experts read the same, so that the norm before them gives a tensor."""

    def settle(self) -> None:
        assert self.self_attn is not None
        self.attn_norm.feed(self.self_attn.accepts)
        self.self_attn.feed(self.mlp_norm.accepts)

    def upto_mlp(
        self, hidden: Passed, residual: Stream | None, rotation: Rotation, batch: ForwardBatch
    ) -> tuple[Tensor, Stream]:
        assert self.self_attn is not None
        normed, residual = self.attn_norm.merge(hidden, residual)
        normed, residual = self.mlp_norm.merge(self.self_attn(normed, rotation, batch.every_token()), residual)
        return whole(normed), residual


class ShortcutLayer(Stage):
    """Two halves; what the experts make of the first one's tokens is added after the second."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__()
        self.first, self.second = FirstHalf(config, ctx, layer), DecoderLayer(config, ctx, layer)
        self.shortcut = ExpertsMLP(config, ctx, layer)
        self._gather_rows, self._add = GATHER_ROWS.bind(ctx.target), ADD_SHARED.bind(ctx.target)

    @property
    def accepts(self) -> Forms:
        return self.first.accepts

    def feed(self, accepted: Forms) -> None:
        self.second.feed(accepted & ROWS)

    def settle(self) -> None:
        self.first.feed(self.second.accepts)

    def forward(
        self, hidden: Passed, residual: Stream | None, rotation: Rotation, batch: ForwardBatch
    ) -> tuple[Passed, Stream]:
        normed, residual = self.first.upto_mlp(hidden, residual, rotation, batch)
        shortcut = whole(self.shortcut(normed))
        assert self.first.mlp is not None
        hidden, residual = self.second(self.first.mlp(normed), residual, rotation, batch)
        if batch.wanted is not None:
            shortcut = self._gather_rows(shortcut, batch.wanted.tokens)
        return on_rows(self._add, hidden, shortcut, None), residual


class LongcatFlash(DecoderLM):
    layer_type = ShortcutLayer
    weight_map = LATENT_EXPERTS.renaming_first(
        ("mlp", "shortcut"),
        ("shortcut.router.classifier.weight$", "shortcut.router.weight$"),
        *((f"{old}.0", f"first.{new}") for old, new in _HALVES.items()),
        *((f"{old}.1", f"second.{new}") for old, new in _HALVES.items()),
    ).ignoring("model.mtp.*")

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {"zero_expert_num": 0, "routed_scaling_factor": 6.0})
        for key, value in _FIXED.items():
            read.one_of(key, value)
        top_k = read.first("moe_topk", "num_experts_per_tok")
        if not isinstance(top_k, int):
            raise ModelError(f"moe_topk is {top_k}; it must be one number, for all layers")
        count = read["num_layers"] if "num_layers" in read else read["num_hidden_layers"] // 2
        experts = ExpertsConfig(
            read.first("n_routed_experts", "num_local_experts"),
            read.first("expert_ffn_hidden_size", "moe_intermediate_size"),
            Routing(top_k, scale=read["routed_scaling_factor"]),
            choice_bias=True,
            identities=read["zero_expert_num"],
        )
        sizes = {"num_hidden_layers": count, "intermediate_size": read.first("ffn_hidden_size", "intermediate_size")}
        return read_latent(
            {**config, **sizes},
            defaults={"rms_norm_eps": 1e-5, "rope_theta": 10_000_000.0},
            scales_ranks=True,
            mixer="latent_pair",
            interleaved_rope=True,
            mlps=("gated",) * count,
            experts=experts,
        )
