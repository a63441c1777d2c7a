"""The latent attention block (MLA): projections to compressed queries, keys and values, and attention over them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from quire.attention.base import AttentionSpec, Rotation
from quire.attention.latent import IndexInputs, LatentWeights
from quire.layers.attention import ForwardBatch
from quire.layers.fusion import Passed, Stage, whole
from quire.layers.latent_attention import (
    LatentAttention,
    RotatedLayerNorm,
    RotatedLinear,
    ScaledRMSNorm,
    UpProjections,
    keeps_latent,
)
from quire.layers.linear import Piece, RowParallelLinear
from quire.layers.norm import RMSNorm
from quire.layers.rope.frequencies import yarn_magnitude
from quire.layers.rope.parameters import rope_parameters
from quire.layers.weights import WeightMap
from quire.models.base import BuildContext
from quire.models.config import ConfigReader, DecoderConfig, IndexConfig, LatentConfig, read_config
from quire.models.decoder import QK_NORM_NAMES
from quire.models.kinds import Mixer
from quire.ops.recurrent import GATE
from quire.ops.scale import SCALE
from quire.ops.select import GATHER_ROWS, TAKE_COLUMNS
from quire.types.cache import LayerKV
from quire.types.errors import ConfigError, ModelError


class LatentBlock(Mixer):
    """Queries of each head, one latent for all of them, attention, output projection."""

    ends = ("a_proj", "o_proj")

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__(config, ctx, layer)
        latent = _latent(config)
        head_dim, kv_rank = latent.nope_dim + latent.rope_dim, latent.kv_rank
        first, self._num_heads = ctx.group.slice_of(config.num_heads, "attention heads")
        interleaved = config.interleaved_rope
        rotated_head = (self._num_heads, latent.nope_dim, head_dim)
        heads = (config.num_heads * head_dim, first * head_dim, self._num_heads * head_dim)
        query = Piece("q_proj", *heads)
        if latent.q_rank is not None:
            query = Piece("q_a_proj", latent.q_rank, 0, latent.q_rank)
        turned = {0: rotated_head} if latent.q_rank is None else {}
        pieces = [query, Piece("kv_a_proj_with_mqa", latent.width, 0, latent.width)]
        sparse, index, index_queries = latent.index, _indexer(config, layer), []
        if sparse is not None and layer in sparse.shared and ctx.pipeline.layers and layer == ctx.pipeline.layers[0]:
            raise ConfigError(
                f"a stage of the pipeline begins with layer {layer}, which attends to the keys that a layer before it"
                " chooses; use --tensor-parallel-size instead, or another --pipeline-parallel-size"
            )
        key_turned: dict[int, tuple[int, int, int]] = {}
        query_turned: dict[int, tuple[int, int, int]] = {}
        if index is not None:  # every rank has the whole indexer
            width = index.num_heads * index.head_dim
            parts = {"indexer.wk": index.head_dim, "indexer.weights_proj": index.num_heads}
            pieces += [Piece(name, size, 0, size) for name, size in parts.items()]
            index_queries = [Piece("indexer.wq_b", width, 0, width)]
            if index.interleaved_rope:
                key_turned, query_turned = {2: (1, 0, latent.rope_dim)}, {1: (index.num_heads, 0, latent.rope_dim)}
        if latent.gated:
            pieces.append(Piece("g_proj", config.num_heads, first, self._num_heads))
        self.a_proj = RotatedLinear(
            config.hidden_size,
            pieces,
            bias=config.qkv_bias,
            target=ctx.target,
            interleaved=({**turned, 1: (1, kv_rank, latent.width)} if interleaved else {}) | key_turned,
        )
        self.q_a_layernorm = self.q_b_proj = self.indexer = None
        if latent.q_rank is not None:
            self.q_a_layernorm = RMSNorm(latent.q_rank, eps=latent.norm_eps, target=ctx.target)
            self.q_b_proj = RotatedLinear(
                latent.q_rank,
                (Piece("q_b_proj", *heads), *index_queries),
                bias=False,
                target=ctx.target,
                interleaved=({0: rotated_head} if interleaved else {}) | query_turned,
            )
        if index is not None:
            self.indexer = Indexer(index, latent.rope_dim, ctx)
        self.kv_a_layernorm = ScaledRMSNorm(kv_rank, latent.kv_scale, eps=latent.norm_eps, target=ctx.target)
        self.kv_b_proj = UpProjections(config.num_heads, kv_rank, latent.nope_dim, latent.value_dim, **ctx.split)
        self.o_proj = RowParallelLinear(
            config.num_heads * latent.value_dim, config.hidden_size, bias=config.o_bias, **ctx.split
        )
        spec = AttentionSpec(
            num_heads=self._num_heads,
            num_kv_heads=1,
            head_dim=latent.width,
            scale=config.attention_scale,
            value_dim=kv_rank,
            index_dim=0 if index is None else index.head_dim,
            top_k=None if sparse is None else sparse.top_k,
        )
        self.attention = LatentAttention(spec, layer, ctx.target)
        self._widths, self._gated, self._value_dim = [piece.size for piece in pieces], latent.gated, latent.value_dim
        self._gate, self._gather_rows = GATE.bind(ctx.target), GATHER_ROWS.bind(ctx.target)
        self._scale, self._take_columns = SCALE.bind(ctx.target), TAKE_COLUMNS.bind(ctx.target)
        self._q_widths = [heads[2], *(piece.size for piece in index_queries)]

    @classmethod
    def keeps(cls, config: DecoderConfig, layer: int) -> LayerKV | None:
        latent, index = _latent(config), _indexer(config, layer)
        return keeps_latent(latent.width, latent.kv_rank, 0 if index is None else index.head_dim)

    def forward(self, hidden: Passed, rotation: Rotation, batch: ForwardBatch) -> Passed:
        projected = whole(self.a_proj(hidden))
        q, latent, *of_index = projected.split(self._widths, dim=-1)
        gates = of_index.pop().repeat_interleave(self._value_dim, dim=1) if self._gated else None
        index: IndexInputs | None = None
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            q, *index_query = whole(self.q_b_proj(self.q_a_layernorm(q))).split(self._q_widths, dim=-1)
            if self.indexer is not None:
                index = self.indexer(index_query[0], *of_index)
        norm, up, scale = self.kv_a_layernorm, self.kv_b_proj, self.attention.spec.kv_scales[0]
        weights = LatentWeights(norm.weight, norm.eps, up.key_up, up.value_up)
        if scale != 1.0:  # all that is kept of a token is divided: what is normed, by its weight
            latent = self._scale(self._take_columns(projected, *self._widths[:2]), 1 / scale)
            weights = weights._replace(norm=self._scale(norm.weight[None], 1 / scale)[0], eps=norm.eps / scale**2)
        heads = q.unflatten(-1, (self._num_heads, -1))
        mixed = self.attention(weights, heads, latent, rotation, batch, index)
        mixed = mixed if scale == 1.0 else self._scale(mixed, scale)
        if gates is not None:
            asked = gates if batch.wanted is None else self._gather_rows(gates, batch.wanted.tokens)
            mixed = self._gate(mixed, asked)
        return self.o_proj(mixed)


class Indexer(Stage):
    """The sparse indexer; its projections are part of the block's own."""

    def __init__(self, index: IndexConfig, rope_dim: int, ctx: BuildContext) -> None:
        super().__init__()
        interleaved = rope_dim if index.interleaved_rope else 0
        self.k_norm = RotatedLayerNorm(index.head_dim, interleaved, eps=1e-6, target=ctx.target)
        self._num_heads = index.num_heads

    def forward(self, query: Tensor, key: Tensor, weights: Tensor) -> IndexInputs:
        """query [n, heads * dim], key [n, dim], weights [n, heads]."""
        return IndexInputs(query.unflatten(-1, (self._num_heads, -1)), self.k_norm(key), weights)


def _latent(config: DecoderConfig) -> LatentConfig:
    assert config.latent is not None, "latent attention needs its sizes"
    return config.latent


def _indexer(config: DecoderConfig, layer: int) -> IndexConfig | None:
    """The layer's own."""
    index = _latent(config).index
    return None if index is None or layer in index.shared else index


def read_latent(
    config: dict[str, Any],
    *,
    defaults: dict[str, Any] | None = None,
    index: IndexConfig | None = None,
    mixer: str = "latent",
    scales_ranks: bool = False,
    **flags: Any,
) -> DecoderConfig:
    """What `read_config` gives, with latent attention by DeepSeek's keys in all layers.

    `scales_ranks`: what was compressed is scaled by the root of how much it was.
    """
    read = ConfigReader(config, {"v_head_dim": 128, **(defaults or {})})
    latent = LatentConfig(
        kv_rank=read["kv_lora_rank"],
        q_rank=read.get("q_lora_rank"),
        nope_dim=read["qk_nope_head_dim"],
        rope_dim=read["qk_rope_head_dim"],
        value_dim=read["v_head_dim"],
        index=index,
        kv_scale=(read["hidden_size"] / read["kv_lora_rank"]) ** 0.5 if scales_ranks else 1.0,
    )
    if index is not None and latent.q_rank is None:
        raise ModelError("a sparse indexer reads the compressed queries; the model config needs q_lora_rank")
    if latent.rope_dim % 2:
        raise ModelError(f"qk_rope_head_dim is {latent.rope_dim}, but features are rotated in pairs; correct it")
    if index is not None and index.head_dim < latent.rope_dim:
        raise ModelError(
            f"index_head_dim is {index.head_dim}, but {latent.rope_dim} features are rotated; correct it"
        )
    if read.flag("attention_bias") and latent.q_rank is None:
        raise ModelError("attention_bias without q_lora_rank is not supported: no published model has both")
    num_layers = read["num_hidden_layers"]
    rope = rope_parameters(read, latent.rope_dim)
    scale = (latent.nope_dim + latent.rope_dim) ** -0.5
    if scales_ranks and latent.q_rank is not None:
        scale *= float((read["hidden_size"] / latent.q_rank) ** 0.5)
    if rope.rope_type != "default" and rope.mscale_all_dim:
        scale *= yarn_magnitude(rope.required("factor"), rope.mscale_all_dim) ** 2
    return read_config(
        config,
        defaults=defaults,
        latent=latent,
        head_dim=latent.width,
        num_kv_heads=1,
        attention_scale=scale,
        mixers=(mixer,) * num_layers,
        rope=(rope,) * num_layers,
        **flags,
    )


def latent_weights(weights: WeightMap) -> WeightMap:
    """Names of a checkpoint of these blocks, where the other layers are named by `weights`."""
    stack = {merged: pieces for merged, pieces in weights.stack.items() if merged != "qkv_proj"}
    stack["a_proj"] = ("q_proj", "q_a_proj", "kv_a_proj_with_mqa", "indexer.wk", "indexer.weights_proj")
    stack["q_b_proj"] = ("q_b_proj", "indexer.wq_b")
    stack["kv_b_proj"] = ("k_b_proj", "v_b_proj")
    rename = {stored: name for stored, name in weights.rename.items() if stored not in QK_NORM_NAMES}
    return replace(weights, stack=stack, rename=rename)
