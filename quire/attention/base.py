"""What an attention backend is: it owns the layout of the KV cache and computes attention over it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionSpec:
    """What one layer asks of attention; fixed when the model is built."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None  # a query sees itself and the window-1 tokens before it
    soft_cap: float | None = None  # scores become cap * tanh(scores / cap)

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The rows of one step as one KV group sees them.

    Tokens of a row are contiguous and rows are in batch order; the token dimension may be padded at the end.
    Padding tokens have slot < block_size (block 0, the null block) and belong to no row.
    """

    query_lens: list[int]  # [num_rows] tokens of each row in this step
    context_lens: list[int]  # [num_rows] KV length of each row after this step
    block_tables: Tensor  # [num_rows, max_blocks] int32
    slot_mapping: Tensor  # [num_tokens_padded] int64: block_id * block_size + offset
    block_size: int


class AttentionMetadata(ABC):  # noqa: B024  each backend adds its own fields; callers treat it as opaque
    """Whatever a backend prepares once per step and group and reads in every layer."""


class AttentionBackend(ABC):
    name: str

    @abstractmethod
    def cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of one layer's cache tensor, keys and values together."""

    @abstractmethod
    def workspace_bytes(self, spec: AttentionSpec, max_model_len: int, itemsize: int) -> int:
        """Most memory that `forward` takes beside its arguments and result."""

    @abstractmethod
    def heal(self, cache: Tensor, block_ids: Tensor) -> None:
        """Replace every value of these blocks that is not finite by zero. block_ids: [n] int64. Mutates `cache`."""

    @abstractmethod
    def prepare(self, batch: AttentionBatch) -> AttentionMetadata:
        """Once per step and KV group. Does not sync the device."""

    @abstractmethod
    def forward(
        self,
        spec: AttentionSpec,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Write key and value into the cache, then attend.

        query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim].
        Returns [num_tokens, num_heads * head_dim]; padding tokens give zeros. Mutates `cache` only.
        """
