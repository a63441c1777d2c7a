"""The encoder that BERT and its relatives are made of: learned positions, bidirectional attention, norms behind.

An architecture maps its config onto EncoderConfig and its tensors' names onto those here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from quire.attention.base import AttentionSpec, Rotation
from quire.layers.attention import Attention, ForwardBatch, keeps_heads
from quire.layers.biased_attention import Bias, BiasedAttention
from quire.layers.embedding import VocabParallelEmbedding
from quire.layers.fusion import Passed, Stage, whole
from quire.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UpGateLinear,
)
from quire.layers.norm import LayerNorm
from quire.layers.rope.embedding import rotary_embedding
from quire.layers.rope.parameters import RopeParameters
from quire.layers.weights import WeightedLayer, WeightMap, empty_parameter
from quire.models.base import BuildContext, Model, ModelDescription
from quire.models.config import ExpertsConfig
from quire.models.heads import make_heads, num_labels, with_heads
from quire.models.token_inputs import PLAIN_INPUTS, TokenInputs
from quire.ops.activation import GELU, GELU_AND_MUL, GELU_TANH, RELU, SILU_AND_MUL
from quire.ops.base import Target
from quire.ops.encoder import ADD_PLACES, MARK_SECOND, POSITIONS_OF
from quire.ops.select import GATHER_ROWS
from quire.types.errors import ModelError
from quire.types.pooling import Classifier, HeadActivation, HeadLayer
from quire.types.sampling import PoolingKind, PoolingParams
from quire.types.step import RowStart

STACKED: dict[str, tuple[str, ...]] = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
GATED: dict[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj")}
GATES = {"gelu": GELU_AND_MUL, "silu": SILU_AND_MUL}
_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh")  # names of one approximation
ACTIVATIONS = {"gelu": GELU, "relu": RELU, **dict.fromkeys(_TANH, GELU_TANH)}
_NO_SECOND = 1 << 62
ClassifierLayers = tuple[tuple[str, HeadActivation | None], ...]
# What checkpoints call the tables of embeddings, and what they are called here.
EMBEDDING_NAMES = {
    "word_embeddings": "words",
    "position_embeddings": "positions",
    "token_type_embeddings": "types",
    "embeddings.LayerNorm": "embeddings.norm",
}
# What stands on top of the encoder in a checkpoint and is not read: the heads of what it was trained for.
HEADS = (
    "*.decoder.weight",
    "*.decoder.bias",
    "vocab_projector.weight",
    "decoder.weight",
    "decoder.bias",
    "head.*",
    "cls.seq_relationship.*",
    "cls.*",
    "lm_head.*",
    "lm_predictions.*",
    "mask_predictions.*",
    "classifier.*",
    "vocab_*",
    "pre_classifier.*",
    "*pooler.dense.*",
    "*position_ids",
    "*token_type_ids",
)


@dataclass(frozen=True)
class EncoderConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_positions: int  # in the table of positions, or the longest prompt where there is none
    num_token_types: int = 0  # all tokens are of the first; 0: there is no such table
    first_position: int = 0  # of the first token, among the positions
    norm_eps: float = 1e-12
    has_positions: bool = True  # a table of them
    rope: RopeParameters | None = None
    gate: str | None = None  # the activation of a gated MLP; None: no gate
    up_first: bool = False  # in a checkpoint that has gate and up in one matrix
    activation: str = "gelu"  # of an MLP without a gate
    bias: bool = True  # of linear layers
    up_bias: bool = True  # of those that the MLP begins with
    score_scale: float | None = None  # of attention; None: by the size of heads
    experts: ExpertsConfig | None = None  # of the layers that have experts in place of an MLP
    experts_every: int = 0  # layers, the second of which has them

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def check_supported(config: dict[str, Any], activation: str, known: Iterable[str] = ("gelu",)) -> None:
    """What no encoder here does is refused by its name."""
    if activation not in known:
        raise ModelError(f"unknown activation {activation!r} in the config of an encoder; known: {', '.join(known)}")
    positions = config.get("position_embedding_type") or "absolute"
    if positions != "absolute":
        raise ModelError(f"position_embedding_type is {positions!r} but encoders here have absolute ones")
    if config.get("is_decoder"):
        raise ModelError("is_decoder is set: this config is of a decoder, and encoders see whole prompts")


class PairInputs(TokenInputs):
    """Token types, beside positions in tokens' places: those of the second text of a pair are 1, all others 0."""

    def __init__(self, max_rows: int, target: Target) -> None:
        self._second = torch.full((max_rows + 1,), _NO_SECOND, dtype=torch.int64)
        self._pairs: set[int] = set()
        self._mark = MARK_SECOND.bind(target)

    def add_request(self, start: RowStart) -> None:
        at = start.params.second_text_at if isinstance(start.params, PoolingParams) else None
        if at is not None:
            self._second[start.row] = at
            self._pairs.add(start.row)

    def remove_request(self, row: int) -> None:
        if row in self._pairs:
            self._pairs.remove(row)
            self._second[row] = _NO_SECOND

    def rotary_positions(self, index: Tensor, rows: Tensor, query_starts: Tensor) -> Tensor:
        return self._mark(index, rows, query_starts, self._second)


class Table(WeightedLayer):
    """Rows that are looked up by position or token type; every rank has all of them."""

    def __init__(self, rows: int, width: int, target: Target) -> None:
        super().__init__()
        self.weight = empty_parameter(rows, width, dtype=target.dtype)


class EncoderEmbeddings(nn.Module):
    def __init__(self, config: EncoderConfig, ctx: BuildContext) -> None:
        super().__init__()
        width, types = config.hidden_size, config.num_token_types
        self.words = VocabParallelEmbedding(config.vocab_size, width, **ctx.split)
        self.positions = Table(config.num_positions, width, ctx.target) if config.has_positions else None
        self.types = Table(types, width, ctx.target) if types else None
        self.norm = LayerNorm(width, eps=config.norm_eps, target=ctx.target)
        self._first, self._add_places = config.first_position, ADD_PLACES.bind(ctx.target)

    def forward(self, input_ids: Tensor, places: Tensor) -> Tensor:
        hidden = self.words(input_ids)
        if self.positions is not None or self.types is not None:
            positions, types = (None if table is None else table.weight for table in (self.positions, self.types))
            hidden = self._add_places(hidden, positions, types, places, self._first)
        return self.norm(hidden)


class EncoderLayer(Stage):
    """Attention and MLP, each added to what it read and then normalized."""

    def __init__(self, config: EncoderConfig, ctx: BuildContext, layer: int, make_bias: Bias | None) -> None:
        super().__init__()
        hidden, heads, head_dim = config.hidden_size, config.num_heads, config.head_dim
        self.qkv_proj = QKVParallelLinear(hidden, heads, heads, head_dim, bias=config.bias, **ctx.split)
        self.o_proj = RowParallelLinear(heads * head_dim, hidden, bias=config.bias, **ctx.split)
        self.up_proj: ColumnParallelLinear | None = None
        self.gate_up_proj: MergedColumnParallelLinear | None = None
        self.down_proj: RowParallelLinear | None = None
        self.add_mlp(config, ctx)
        self.attn_norm, self.mlp_norm = (LayerNorm(hidden, eps=config.norm_eps, target=ctx.target) for _ in range(2))
        mine, scale = self.qkv_proj.num_heads, config.score_scale or head_dim**-0.5
        spec = AttentionSpec(mine, mine, head_dim, scale, causal=False)
        self.attention = (
            Attention(spec, layer, ctx.target)
            if make_bias is None
            else BiasedAttention(spec, layer, ctx.target, make_bias)
        )
        self._gather_rows = GATHER_ROWS.bind(ctx.target)

    def add_mlp(self, config: EncoderConfig, ctx: BuildContext) -> None:
        hidden, width = config.hidden_size, config.intermediate_size
        if config.gate is None:
            self.up_proj = ColumnParallelLinear(hidden, width, bias=config.up_bias, **ctx.split)
        else:
            both = {"gate_proj": width, "up_proj": width}
            merged = UpGateLinear if config.up_first else MergedColumnParallelLinear
            self.gate_up_proj = merged(hidden, both, bias=config.up_bias, **ctx.split)
        self.down_proj = RowParallelLinear(width, hidden, bias=config.bias, **ctx.split)
        self._act = (ACTIVATIONS[config.activation] if config.gate is None else GATES[config.gate]).bind(ctx.target)

    def mlp(self, hidden: Tensor) -> Passed:
        """[n, hidden] -> [n, hidden]."""
        up = self.gate_up_proj or self.up_proj
        assert up is not None
        assert self.down_proj is not None
        return self.down_proj(self._act(whole(up(hidden))))

    def forward(self, hidden: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        """[n, hidden] -> [n, hidden], or of the wanted tokens alone."""
        mixed = self.o_proj(self.attention(self.qkv_proj(hidden), None, rotation, batch))
        if batch.wanted is not None:
            hidden = self._gather_rows(hidden, batch.wanted.tokens)
        normed, _ = self.attn_norm.merge(mixed, hidden)
        hidden = whole(normed)
        normed, _ = self.mlp_norm.merge(self.mlp(hidden), hidden)
        return whole(normed)


class Encoder(Model):
    capabilities = frozenset({"pools", "encodes"})
    classifier_layers: ClassVar[ClassifierLayers]
    """The layers of a classifier of prompts, each with the activation behind it."""
    token_classifier_layers: ClassVar[ClassifierLayers] = (("classifier", None),)
    """The same of a classifier of tokens."""
    masked: ClassVar[tuple[str, str, str]]
    """Of the head that predicts masked tokens: its layer, the norm behind it, and what has the biases of tokens."""
    names: ClassVar[dict[str, str]]
    """Segments of the architecture's tensor names, and what they are called here."""
    outer: ClassVar[dict[str, str]]
    """The same of the first segments, before which checkpoints with a head have a prefix."""
    prefix: ClassVar[str]
    embeddings: nn.Module
    rotary: nn.Module | None

    def __init__(self, config: EncoderConfig, ctx: BuildContext, make_bias: Bias | None = None) -> None:
        """`make_bias`: what layers add to the scores of attention."""
        super().__init__()
        self._num_token_types, self._target = config.num_token_types, ctx.target
        embeddings = self.embeddings = EncoderEmbeddings(config, ctx)
        self.heads = make_heads(ctx.heads, ctx.target, embeddings.words)
        self.layers = nn.ModuleList(
            self.layer_kind(config, layer)(config, ctx, layer, make_bias) for layer in range(config.num_layers)
        )
        self.rotary = None if config.rope is None else rotary_embedding(config.rope, ctx.max_model_len, ctx.target)
        self._positions_of = POSITIONS_OF.bind(ctx.target)

    @classmethod
    def layer_kind(cls, config: EncoderConfig, layer: int) -> type[EncoderLayer]:
        return EncoderLayer

    @classmethod
    @abstractmethod
    def encoder_config(cls, config: dict[str, Any]) -> EncoderConfig:
        """Map a Hugging Face config onto the shared blocks' sizes."""

    @classmethod
    def from_config(cls, config: dict[str, Any], ctx: BuildContext) -> Self:
        model = cls.built(config, ctx)
        outer = {f"{cls.prefix}.{old}": new for old, new in cls.outer.items()}
        if str(config["architectures"][0]).endswith("Model"):  # published with the prefix or without
            outer |= cls.outer
        stack = STACKED if cls.encoder_config(config).gate is None else {**STACKED, **GATED}
        model.weight_map = with_heads(WeightMap({**outer, **cls.names}, stack, HEADS), ctx.heads)
        return model

    @classmethod
    def classifier(cls, config: dict[str, Any]) -> Classifier | None:
        name = str(config["architectures"][0])
        of_tokens = name.endswith("ForTokenClassification")
        if not of_tokens and not name.endswith("ForSequenceClassification"):
            return None
        layers = cls.token_classifier_layers if of_tokens else cls.classifier_layers
        hidden, last = cls.encoder_config(config).hidden_size, len(layers) - 1
        found = tuple(
            HeadLayer(source, hidden, num_labels(config) if index == last else hidden, activation=activation)
            for index, (source, activation) in enumerate(layers)
        )
        return Classifier("all" if of_tokens else cls.classified(config), found)

    @classmethod
    def token_head(cls, config: dict[str, Any]) -> tuple[HeadLayer, ...]:
        if not str(config["architectures"][0]).endswith("ForMaskedLM"):
            return ()
        sizes = cls.encoder_config(config)
        if sizes.activation not in ("gelu", "relu"):
            return ()  # no head has it
        first, norm, last = cls.masked
        activation: HeadActivation = "relu" if sizes.activation == "relu" else "gelu"
        return (
            HeadLayer(
                first, sizes.hidden_size, sizes.hidden_size, activation=activation, norm=norm, norm_eps=sizes.norm_eps
            ),
            HeadLayer(last, sizes.hidden_size, sizes.vocab_size, tied=True),
        )

    @classmethod
    def classified(cls, config: dict[str, Any]) -> PoolingKind:
        """What a classifier of prompts reads."""
        return "cls"

    @classmethod
    def built(cls, config: dict[str, Any], ctx: BuildContext) -> Self:
        return cls(cls.encoder_config(config), ctx)

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        encoder = cls.encoder_config(config)
        kept = keeps_heads(encoder.num_heads, encoder.head_dim, None)
        return ModelDescription(
            vocab_size=encoder.vocab_size,
            hidden_size=encoder.hidden_size,
            num_layers=encoder.num_layers,
            max_position_embeddings=encoder.num_positions - encoder.first_position,
            layers=(kept,) * encoder.num_layers,
            is_bidirectional=True,
        )

    def token_inputs(self, max_rows: int, max_model_len: int) -> TokenInputs:
        return PairInputs(max_rows, self._target) if self._num_token_types > 1 else PLAIN_INPUTS

    def forward(
        self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        hidden: Tensor = self.embeddings(input_ids, positions) if inputs_embeds is None else inputs_embeds
        rotation = None if self.rotary is None else self.rotary(self._positions_of(positions))
        every_token = batch.every_token()
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, rotation, batch if index == len(self.layers) - 1 else every_token)
        return hidden
