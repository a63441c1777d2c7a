"""The decoder: embeddings, a stack of layers, the final norm, and the LM head on top."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from quire.attention.base import Rotation
from quire.layers.attention import ForwardBatch
from quire.layers.embedding import HeadProjection, LMHead, TiedProjection, VocabParallelEmbedding
from quire.layers.fusion import ROWS, Passed, Stage, Stream, on_rows, whole
from quire.layers.rope.embedding import rotary_embedding
from quire.layers.rope.parameters import QueryTemperature, RopeParameters
from quire.layers.weights import WeightMap
from quire.models.base import BuildContext, CausalLM, ModelDescription
from quire.models.blocks import DecoderLayer, make_norm
from quire.models.config import DecoderConfig, read_config
from quire.models.heads import make_heads, num_labels, with_heads
from quire.models.kinds import MIXERS, NONE
from quire.ops.grouped import ADD_SHARED
from quire.ops.scale import SCALE, rounded
from quire.types.pooling import Classifier, HeadLayer

STACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj", "{i}.gate_proj", "{i}.up_proj", "all.gate_proj", "all.up_proj"),
    "down_proj": ("{i}.down_proj", "all.down_proj"),
}
EXPERT_MATRICES = (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj"))  # as Mixtral names them
QK_NORM_NAMES = {"q_norm": "qk_norm.q", "k_norm": "qk_norm.k"}
PRE_NORM_WEIGHTS = WeightMap(
    rename={"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm", **QK_NORM_NAMES}, stack=STACKED
)
EXPERT_WEIGHTS = PRE_NORM_WEIGHTS.renaming(("mlp.gate", "mlp.router"), ("e_score_correction_bias", "choice_bias"))
PRE_POST_NORM_WEIGHTS = WeightMap(
    rename={
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "attn_post_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_post_norm",
        **QK_NORM_NAMES,
    },
    stack=STACKED,
)


# Embedders are often stored without the part of names that stands for what is below the LM head.
_WITHOUT_PREFIX = (
    *((name, f"model.{name}") for name in ("embed_tokens", "layers", "norm")),
    ("model.model", "model"),
)


class Decoder(Stage):
    def __init__(
        self, config: DecoderConfig, ctx: BuildContext, layer_type: Callable[..., Stage] = DecoderLayer
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, **ctx.split)
        self.embedding_norm = make_norm(config, ctx) if config.embedding_norm else None
        factor = config.embedding_scale
        self.embedding_scale = None if factor is None else rounded(factor, ctx.dtype)
        self._scale = SCALE.bind(ctx.target)
        self._pipeline = pipeline = ctx.pipeline
        self.layers = nn.ModuleList(
            layer_type(config, ctx, layer) if pipeline.holds(layer) else nn.Identity()
            for layer in range(config.num_layers)
        )
        self.norm = make_norm(config, ctx)
        self._add = ADD_SHARED.bind(ctx.target)
        tables: dict[RopeParameters | QueryTemperature | None, int] = {None: -1}
        for rope in config.rope:
            tables.setdefault(rope, len(tables) - 1)
        self.rotary = nn.ModuleList(
            rotary_embedding(rope, ctx.max_model_len, ctx.target) for rope in tables if rope is not None
        )
        self._rotary_of_layer = [tables[rope] for rope in config.rope]

    def settle(self) -> None:
        layers = [layer for layer in self.layers if isinstance(layer, Stage)]
        # What leaves a stage that is not the last has no reader here.
        forms = [*(layer.accepts for layer in layers[1:]), self.norm.accepts if self._pipeline.is_last else ROWS]
        for layer, accepted in zip(layers, forms, strict=True):
            layer.feed(accepted)

    def embed(self, input_ids: Tensor) -> Tensor:
        """[n] -> [n, hidden], scaled or normed where the architecture does that to embeddings."""
        hidden: Tensor = self.embed_tokens(input_ids)
        if self.embedding_norm is not None:
            hidden = self.embedding_norm(hidden)
        return hidden if self.embedding_scale is None else self._scale(hidden, self.embedding_scale)

    def run_layers(
        self, hidden: Passed, positions: Tensor, batch: ForwardBatch, capture: Collection[int] = ()
    ) -> tuple[Passed, Stream | None, dict[int, Tensor]]:
        """Run the layers of this process on what the first reads, and return (hidden, residual, captured).

        captured[i], for each i in `capture`, is the residual stream as layer i receives it; the number of the layer
        after the last gives the stream that leaves. The last layer of all computes the batch's wanted tokens alone.
        """
        first, last = self._pipeline.layers or (0, len(self.layers))
        residual: Stream | None = None
        rotations: list[Rotation] = [rotary(positions) for rotary in self.rotary]
        rotations.append(None)  # index -1: layers that rotate nothing
        captured: dict[int, Tensor] = {}
        every_token = batch.every_token()
        for index in range(first, last):
            if index in capture:
                captured[index] = self._stream(hidden, residual)
            rotation = rotations[self._rotary_of_layer[index]]
            seen = batch if index == len(self.layers) - 1 else every_token
            hidden, residual = self.layers[index](hidden, residual, rotation, seen)
        if last in capture:
            captured[last] = self._stream(hidden, residual)
        return hidden, residual, captured

    def _stream(self, hidden: Passed, residual: Stream | None) -> Tensor:
        """The residual stream, by an op that steps can be recorded with."""
        return whole(hidden if residual is None else on_rows(self._add, residual, hidden, None))

    def cut(self, *, tied: bool) -> Iterator[str]:
        """Drop what other stages of a pipeline hold, and return its paths in here."""
        pipeline = self._pipeline
        yield from (f"layers.{layer}" for layer in range(len(self.layers)) if not pipeline.holds(layer))
        if not pipeline.is_first and not (tied and pipeline.is_last):
            del self.embed_tokens
            yield "embed_tokens"
        if not pipeline.is_last:
            del self.norm
            yield "norm"

    def finish(self, hidden: Passed, residual: Stream | None) -> Tensor:
        """The final norm of the residual stream; before the last stage of a pipeline, the stream itself."""
        if not self._pipeline.is_last:
            assert residual is not None, "a stage has at least one layer"
            return self._stream(hidden, residual)
        normed, _ = self.norm.merge(hidden, residual)
        return whole(normed)


def described(decoder: DecoderConfig) -> ModelDescription:
    kept = (MIXERS.get(name).keeps_all(decoder, layer) for layer, name in enumerate(decoder.mixers) if name != NONE)
    return ModelDescription(
        vocab_size=decoder.vocab_size,
        hidden_size=decoder.hidden_size,
        num_layers=decoder.num_layers,
        max_position_embeddings=decoder.max_position_embeddings,
        layers=tuple(chain.from_iterable(kept)),
        is_bidirectional=not decoder.causal,
    )


class DecoderLM(CausalLM):
    """A causal LM over the shared blocks. An architecture says how it differs from Llama: by flags, or by reading its
    config itself in `decoder_config`, and by a weight map."""

    weight_map = PRE_NORM_WEIGHTS
    layer_type: ClassVar[type[Stage]] = DecoderLayer
    defaults: ClassVar[Mapping[str, Any]] = {}
    """What keys of a config are that it leaves out."""
    flags: ClassVar[Mapping[str, Any]] = {}
    """Arguments of `read_config` that all models of the class share."""
    has_draft_layer: ClassVar[bool] = False
    """Whether published checkpoints have a layer behind the last, which drafts tokens."""
    taps: tuple[int, ...] = ()
    """Layers whose inputs a draft head reads."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config, self.hidden_size = config, config.hidden_size
        if self.has_draft_layer:
            self.weight_map = self.weight_map.ignoring(f"model.layers.{config.num_layers}.*")
        self.model = Decoder(config, ctx, self.layer_type)
        self.lm_head = None
        if not ctx.head:
            self.heads = make_heads(ctx.heads, ctx.target)
            plain = self.weight_map.ignoring("lm_head.*", "score.*").renaming(*_WITHOUT_PREFIX)
            self.weight_map = with_heads(plain, ctx.heads)
            return
        projection: TiedProjection | HeadProjection
        if config.tied_embeddings:
            projection = TiedProjection(self.model.embed_tokens)
            self.weight_map = self.weight_map.ignoring("lm_head.weight")
        else:
            projection = HeadProjection(config.hidden_size, config.vocab_size, bias=config.head_bias, **ctx.split)
            self.weight_map = self.weight_map.renaming(("lm_head", "lm_head.projection"))
        self.lm_head = LMHead(
            projection, logit_divisor=config.logit_divisor, logit_soft_cap=config.logit_soft_cap, **ctx.split
        )
        self.absent = tuple(f"model.{path}" for path in self.model.cut(tied=config.tied_embeddings))
        if not ctx.pipeline.is_last:
            self.lm_head = None
            self.absent += ("lm_head",)

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        """Map a Hugging Face config onto the shared blocks' flags."""
        return read_config(config, defaults=cls.defaults, **cls.flags)

    @classmethod
    def from_config(cls, config: dict[str, Any], ctx: BuildContext) -> Self:
        return cls(cls.decoder_config(config), ctx)

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        return described(cls.decoder_config(config))

    @classmethod
    def classifier(cls, config: dict[str, Any]) -> Classifier | None:
        name, hidden = str(config["architectures"][0]), cls.decoder_config(config).hidden_size
        labels = num_labels(config)
        if name.endswith("ForSequenceClassification"):
            return Classifier("last", (HeadLayer("score", hidden, labels, bias=False),))
        if name.endswith("ForTokenClassification"):
            return Classifier("all", (HeadLayer("score", hidden, labels),))
        if name.endswith("RewardModel"):
            labels = 2 if name.endswith("ProcessRewardModel") else 1
            layers = HeadLayer("score.0", hidden, hidden, activation="relu"), HeadLayer("score.2", hidden, labels)
            return Classifier("all", layers, rewards=labels == 1)
        return None

    def forward(
        self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        return self.forward_tapped(input_ids, positions, batch, inputs_embeds)[0]

    def forward_tapped(
        self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch, inputs_embeds: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return what `forward` does, and what each of the taps reads of all tokens, [n, hidden]."""
        embeds = self.model.embed(input_ids) if inputs_embeds is None else inputs_embeds
        hidden, residual, captured = self.model.run_layers(embeds, positions, batch, self.taps)
        return self.model.finish(hidden, residual), tuple(captured[layer] for layer in self.taps)

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.model.embed(input_ids)

    def compute_logits(self, hidden: Tensor, whole: bool = True) -> Tensor:
        if self.lm_head is None:
            return super().compute_logits(hidden, whole)
        return self.lm_head(hidden, whole)
