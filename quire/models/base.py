"""Model and CausalLM: what models offer to the worker. Knows tokens and hidden states, not requests."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, TypedDict

import torch
from torch import Tensor, nn

from quire.layers.attention import AttentionLayer, CachedLayer, ForwardBatch
from quire.layers.embedding import LMHead
from quire.layers.fusion import Stage
from quire.layers.linear import Linear
from quire.layers.weights import MappedModule
from quire.models.heads import PoolingHead
from quire.models.token_inputs import PLAIN_INPUTS, TokenInputs
from quire.ops.base import Target
from quire.parallel.groups import ParallelGroup
from quire.parallel.pipeline import Pipeline
from quire.types.cache import LayerKV
from quire.types.errors import EngineError
from quire.types.ledger import EngineSizes, LedgerLine, largest
from quire.types.pooling import Classifier, HeadLayer, Heads


class Split(TypedDict):
    """What a layer that ranks share is made with."""

    target: Target
    group: ParallelGroup


@dataclass(frozen=True)
class BuildContext:
    """What a model is built for. Parameters land on the current default device."""

    dtype: torch.dtype
    max_model_len: int
    group: ParallelGroup = field(default_factory=ParallelGroup)
    platform: str = "cpu"  # whose implementations of ops are bound
    quantization: str = "auto"  # how weights are kept, see Target
    deterministic: bool = False
    activations: str = "auto"
    moe_backend: str = "auto"
    head: bool = True  # whether its logits are read; without, a causal LM is built without its LM head
    heads: Heads = field(default_factory=dict)  # of one that pools: what is on top of it instead
    pipeline: Pipeline = field(default_factory=Pipeline)  # which of its layers are built

    @property
    def target(self) -> Target:
        return Target(
            *(self.platform, self.dtype, self.quantization, self.deterministic, self.activations, self.moe_backend)
        )

    @property
    def split(self) -> Split:
        return {"target": self.target, "group": self.group}


Capability = Literal["generates", "pools", "encodes", "takes_media"]


@dataclass(frozen=True)
class ModelDescription:
    """What is known of a model from its config alone."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int  # tokens the model is meant for, RoPE scaling included
    layers: tuple[LayerKV, ...]  # what is kept of tokens and of rows, in the order of `cached_layers`
    is_bidirectional: bool = False  # as Model.is_bidirectional


class Model(MappedModule):
    """Any model: it declares what it can be used for. The caller runs it under torch.inference_mode."""

    capabilities: ClassVar[frozenset[Capability]]
    fits_float16: ClassVar[bool] = False
    """Whether activations of the architecture's published models are known to stay below float16's largest, 65504."""
    heads: nn.ModuleDict
    hidden_size: int
    num_hidden_read: int = 0
    """Of a drafter: how many hidden states of each token of its target it reads, side by side."""
    drafter: Model | None
    """What drafts tokens for this model, set once both are built: a part of its caches and of its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.drafter = None

    @classmethod
    @abstractmethod
    def from_config(cls, config: dict[str, Any], ctx: BuildContext) -> Self:
        """Build with unfilled parameters from a Hugging Face config."""

    @classmethod
    @abstractmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        """What a Hugging Face config says of the model."""

    @abstractmethod
    def forward(
        self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """input_ids [n] -> hidden states after the final norm [n, hidden]. Writes the KV cache.

        `positions` are those that tokens are rotated by, [n] or [axes, n]; where tokens stand in the cache, and what
        they see, is the batch's affair. With `batch.wanted` they are of those tokens alone.

        `inputs_embeds` [n, hidden] replaces the (scaled) token embeddings; it is not written to.
        """

    @classmethod
    def classifier(cls, config: dict[str, Any]) -> Classifier | None:
        """What a checkpoint of this config has on top to classify with."""
        return None

    @classmethod
    def token_head(cls, config: dict[str, Any]) -> tuple[HeadLayer, ...]:
        """What a checkpoint of this config has on top to predict masked tokens with, the last layer being a logit of
        each; empty if nothing."""
        return ()

    def head(self, name: str) -> PoolingHead:
        """One of those that the model was built with."""
        found = self.heads[name]
        assert isinstance(found, PoolingHead)
        return found

    def cached_layers(self) -> list[CachedLayer]:
        """In layer order; each must be bound before the first forward."""
        return [module for module in self.modules() if isinstance(module, CachedLayer)]

    def attention_layers(self) -> list[AttentionLayer]:
        return [layer for layer in self.cached_layers() if isinstance(layer, AttentionLayer)]

    @property
    def is_bidirectional(self) -> bool:
        """Whether a token sees those after it too, so that whole prompts have to be computed in one step."""
        return any(not layer.spec.causal for layer in self.attention_layers())

    def compute_logits(self, hidden: Tensor, whole: bool = True) -> Tensor:
        """[m, hidden] -> [m, vocab] in the model's dtype; of a model that generates.

        Without `whole` they are of this rank's slice of the vocabulary, as its sampler takes them.
        """
        raise EngineError(f"{type(self).__name__} has no LM head: it pools, and samples nothing")

    def token_inputs(self, max_rows: int, max_model_len: int) -> TokenInputs:
        """What its tokens need besides their ids, for `max_rows` rows and one for padding."""
        return PLAIN_INPUTS

    def token_bytes(self, hidden_size: int, itemsize: int) -> int:
        """About what a step takes for each of its tokens."""
        widest = max(layer.out_features for layer in self.modules() if isinstance(layer, Linear))
        widest = min(widest, 16 * hidden_size)  # an untied head is wide, but runs on sampled rows only
        return (8 * hidden_size + 3 * widest) * itemsize

    def contributes(self, sizes: EngineSizes) -> Iterable[LedgerLine]:
        """What a step takes in layers, besides attention."""
        count = sizes.max_num_batched_tokens
        yield LedgerLine("activations", int(count * sizes.token_bytes), f"steps of {count} tokens", in_step=True)
        stages = (module for module in self.modules() if isinstance(module, Stage))
        yield from largest(line for stage in stages for line in stage.contributes(sizes))


class CausalLM(Model):
    """A causal language model."""

    capabilities = frozenset({"generates", "pools"})
    lm_head: LMHead | None  # None: built to pool

    @abstractmethod
    def embed(self, input_ids: Tensor) -> Tensor:
        """[n] -> [n, hidden], what the first layer reads of these tokens."""
