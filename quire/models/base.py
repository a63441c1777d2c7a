"""CausalLM: what every model offers to the worker. Knows tokens and hidden states, not requests."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from quire.layers.attention import Attention, ForwardBatch
from quire.layers.embedding import LMHead
from quire.layers.weights import MappedModule
from quire.ops.base import Target
from quire.parallel.groups import ParallelGroup


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

    @property
    def target(self) -> Target:
        return Target(self.platform, self.dtype, self.quantization, self.deterministic, self.activations)


class CausalLM(MappedModule):
    """A causal language model. The caller runs it under torch.inference_mode."""

    lm_head: LMHead
    fits_float16: ClassVar[bool] = False
    """Whether activations of the architecture's published models are known to stay below float16's largest, 65504."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: dict[str, Any], ctx: BuildContext) -> Self:
        """Build with unfilled parameters from a Hugging Face config."""

    @abstractmethod
    def forward(
        self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """input_ids, positions: [n] -> hidden states after the final norm [n, hidden]. Writes the KV cache.

        With `batch.wanted` they are of those tokens alone.

        `inputs_embeds` [n, hidden] replaces the (scaled) token embeddings; it is not written to.
        """

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[m, hidden] -> [m, vocab] in the model's dtype."""

    @abstractmethod
    def attention_layers(self) -> list[Attention]:
        """In layer order; each must be bound before the first forward."""
