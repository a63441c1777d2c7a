"""ModernBERT: norms before attention and MLP, rotated positions, most layers with a window on both sides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from quire.attention.base import AttentionSpec, Rotation
from quire.layers.attention import Attention, ForwardBatch, WantedTokens, keeps_heads
from quire.layers.embedding import VocabParallelEmbedding
from quire.layers.fusion import Stage, whole
from quire.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from quire.layers.norm import LayerNorm
from quire.layers.rope.embedding import rotary_embedding
from quire.models.base import BuildContext, Model, ModelDescription
from quire.models.config import ConfigReader, DecoderConfig, read_config
from quire.models.encoder import Encoder, EncoderConfig, check_supported
from quire.models.heads import make_heads
from quire.models.token_inputs import PLAIN_INPUTS, TokenInputs
from quire.ops.activation import GELU
from quire.ops.select import GATHER_ROWS
from quire.types.pooling import Classifier, HeadLayer
from quire.types.sampling import PoolingKind

DEFAULTS: dict[str, Any] = {
    "hidden_activation": "gelu",
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_pooling": "cls",
    "norm_eps": 1e-5,
    "norm_bias": False,
    "local_attention": 128,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160_000.0,
    "local_rope_theta": 10_000.0,
}


def stack_config(config: dict[str, Any]) -> DecoderConfig:
    """Sizes, rotations and windows of the layers."""
    read = ConfigReader(config, DEFAULTS)
    every = read["global_attn_every_n_layers"]
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": read["global_rope_theta"]},
        "sliding_attention": {"rope_type": "default", "rope_theta": read["local_rope_theta"]},
    }
    given = {
        "layer_types": [
            "sliding_attention" if layer % every else "full_attention" for layer in range(read["num_hidden_layers"])
        ],
        "rope_parameters": rope,
        **{key: value for key, value in config.items() if value is not None},
        "sliding_window": read["local_attention"] // 2 + 1,
    }
    return read_config(given, defaults=DEFAULTS, is_sliding=lambda layer: layer % every != 0, causal=False)


class ModernBertLayer(Stage):
    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int, eps: float, norm_bias: bool) -> None:
        super().__init__()
        kind: dict[str, Any] = {"target": ctx.target, "group": ctx.group}
        hidden, width, heads, head_dim = (
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.head_dim,
        )
        self.attn_norm, self.mlp_norm = (
            LayerNorm(hidden, eps=eps, target=ctx.target, bias=norm_bias) if wanted else None
            for wanted in (layer > 0, True)
        )
        self.qkv_proj = QKVParallelLinear(hidden, heads, heads, head_dim, bias=config.qkv_bias, **kind)
        self.o_proj = RowParallelLinear(heads * head_dim, hidden, bias=config.o_bias, **kind)
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, {"gate_proj": width, "up_proj": width}, bias=config.mlp_bias, **kind
        )
        self.down_proj = RowParallelLinear(width, hidden, bias=config.mlp_bias, **kind)
        mine, window = self.qkv_proj.num_heads, config.sliding_windows[layer]
        spec = AttentionSpec(mine, mine, head_dim, head_dim**-0.5, sliding_window=window, causal=False)
        self.attention = Attention(spec, layer, ctx.target)
        self._gelu, self._gather_rows = GELU.bind(ctx.target), GATHER_ROWS.bind(ctx.target)

    def forward(self, hidden: Tensor, rotation: Rotation, batch: ForwardBatch, wanted: WantedTokens | None) -> Tensor:
        """[n, hidden] -> [n, hidden], or of the wanted tokens alone."""
        normed = hidden if self.attn_norm is None else self.attn_norm(hidden)
        mixed = whole(self.o_proj(self.attention(self.qkv_proj(normed), None, rotation, batch, wanted)))
        if wanted is not None:
            hidden = self._gather_rows(hidden, wanted.tokens)
        assert self.mlp_norm is not None
        read, total = self.mlp_norm.merge(mixed, hidden)
        gate, up = whole(self.gate_up_proj(read)).chunk(2, dim=-1)
        return total + whole(self.down_proj(self._gelu(gate.contiguous()) * up))


class ModernBertEmbeddings(nn.Module):
    def __init__(self, config: DecoderConfig, ctx: BuildContext, eps: float, norm_bias: bool) -> None:
        super().__init__()
        self.words = VocabParallelEmbedding(config.vocab_size, config.hidden_size, target=ctx.target, group=ctx.group)
        self.norm = LayerNorm(config.hidden_size, eps=eps, target=ctx.target, bias=norm_bias)

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.norm(self.words(input_ids))
        return out


class ModernBert(Encoder):
    prefix = "model"
    outer: ClassVar = {"layers": "layers", "embeddings": "embeddings", "final_norm": "final_norm"}
    classifiers: ClassVar = {
        "ForSequenceClassification": (("head.dense", "gelu"), ("classifier", None)),
        "ForTokenClassification": (("head.dense", "gelu"), ("classifier", None)),
    }
    masked: ClassVar = ("head.dense", "head.norm", "decoder")
    names: ClassVar = {
        "tok_embeddings": "words",
        "attn.Wqkv": "qkv_proj",
        "attn.Wo": "o_proj",
        "mlp.Wi": "gate_up_proj",
        "mlp.Wo": "down_proj",
    }

    def __init__(self, config: dict[str, Any], ctx: BuildContext) -> None:
        Model.__init__(self)
        stack, read = stack_config(config), ConfigReader(config, DEFAULTS)
        norm = {"eps": read["norm_eps"], "norm_bias": read["norm_bias"]}
        embeddings = self.embeddings = ModernBertEmbeddings(stack, ctx, **norm)
        self.heads = make_heads(ctx.heads, ctx.target, embeddings.words)
        self.layers = nn.ModuleList(ModernBertLayer(stack, ctx, layer, **norm) for layer in range(stack.num_layers))
        self.final_norm = LayerNorm(
            stack.hidden_size, eps=read["norm_eps"], target=ctx.target, bias=read["norm_bias"]
        )
        ropes = list(dict.fromkeys(stack.rope))
        self.rotary = nn.ModuleList(rotary_embedding(rope, ctx.max_model_len, ctx.target) for rope in ropes if rope)
        self._rotary_of_layer = [ropes.index(rope) for rope in stack.rope]

    @classmethod
    def built(cls, config: dict[str, Any], ctx: BuildContext) -> Self:
        return cls(config, ctx)

    @classmethod
    def encoder_config(cls, config: dict[str, Any]) -> EncoderConfig:
        read, stack = ConfigReader(config, DEFAULTS), stack_config(config)
        check_supported(config, read["hidden_activation"])
        return EncoderConfig(
            vocab_size=stack.vocab_size,
            hidden_size=stack.hidden_size,
            intermediate_size=stack.intermediate_size,
            num_layers=stack.num_layers,
            num_heads=stack.num_heads,
            num_positions=stack.max_position_embeddings,
            norm_eps=read["norm_eps"],
        )

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        stack = stack_config(config)
        kept = tuple(keeps_heads(stack.num_heads, stack.head_dim, window) for window in stack.sliding_windows)
        return replace(super().describe(config), layers=kept)

    @classmethod
    def classifier(cls, config: dict[str, Any]) -> Classifier | None:
        found = super().classifier(config)
        if found is None:
            return None
        return Classifier(found.kind, (cls._first_layer(config, found.layers[0]), *found.layers[1:]))

    @classmethod
    def token_head(cls, config: dict[str, Any]) -> tuple[HeadLayer, ...]:
        layers = super().token_head(config)
        return (cls._first_layer(config, layers[0]), *layers[1:]) if layers else ()

    @classmethod
    def _first_layer(cls, config: dict[str, Any], layer: HeadLayer) -> HeadLayer:
        """What all its heads begin with."""
        read = ConfigReader(config, DEFAULTS)
        check_supported(config, read["classifier_activation"])
        return HeadLayer(
            layer.source,
            layer.in_size,
            layer.out_size,
            bias=read["classifier_bias"],
            activation="gelu",
            norm="head.norm",
            norm_eps=read["norm_eps"],
            norm_bias=read["norm_bias"],
        )

    @classmethod
    def classified(cls, config: dict[str, Any]) -> PoolingKind:
        pooling: PoolingKind = ConfigReader(config, DEFAULTS)["classifier_pooling"]
        return pooling

    def token_inputs(self, max_rows: int, max_model_len: int) -> TokenInputs:
        return PLAIN_INPUTS

    def forward(
        self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        hidden: Tensor = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        rotations: list[Rotation] = [rotary(positions) for rotary in self.rotary]
        for index, layer in enumerate(self.layers):
            wanted = batch.wanted if index == len(self.layers) - 1 else None
            hidden = layer(hidden, rotations[self._rotary_of_layer[index]], batch, wanted)
        out: Tensor = self.final_norm(hidden)
        return out
