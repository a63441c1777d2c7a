"""What an attention backend is: it owns the layout of the KV cache and computes attention over it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.parts import Parts
from quire.platform.recording import SizedRecorder

Rotation = tuple[Tensor, Tensor] | None  # cos and sign-folded sin of a step, [n, 1, rotary_dim]; None: no rotation


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


class HeadNorm(NamedTuple):
    """RMS norm of each query and key head, before the rotation."""

    q_weight: Tensor  # [head_dim]
    k_weight: Tensor  # [head_dim]
    eps: float
    weight_offset: float


NO_HEAD_NORM = (None, None, 0.0, 0.0)  # in place of a HeadNorm's fields


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The rows of one step as one KV group sees them.

    Tokens of a row are contiguous and rows are in batch order; the token dimension may be padded at the end.
    Padding tokens have slot < block_size (block 0, the null block) and belong to no row. The host's lists and the
    device's tensors say the same; a step that runs as a graph has only the latter.
    """

    query_lens: list[int]  # [num_rows] tokens of each row in this step
    context_lens: list[int]  # [num_rows] KV length of each row after this step
    tables: Tensor  # [max_rows, max_blocks] int32, block ids of every row there is
    rows: Tensor  # [num_rows] int64, which lines of `tables` these are
    contexts: Tensor  # [num_rows] int32, context_lens
    query_starts: Tensor  # [num_rows + 1] int32, index of each row's first token
    slot_mapping: Tensor  # [num_tokens_padded] int64: block_id * block_size + offset
    block_size: int


def make_batch(
    query_lens: list[int], context_lens: list[int], block_tables: Tensor, slot_mapping: Tensor, block_size: int
) -> AttentionBatch:
    """A batch whose rows are the lines of `block_tables` [num_rows, max_blocks]."""
    device = block_tables.device
    starts = torch.tensor([0, *query_lens], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    return AttentionBatch(
        query_lens=query_lens,
        context_lens=context_lens,
        tables=block_tables,
        rows=torch.arange(len(query_lens), device=device),
        contexts=torch.tensor(context_lens, dtype=torch.int32, device=device),
        query_starts=starts,
        slot_mapping=slot_mapping,
        block_size=block_size,
    )


class AttentionMetadata(ABC):  # noqa: B024  each backend adds its own fields; callers treat it as opaque
    """Whatever a backend prepares once per step and group and reads in every layer."""


class AttentionBackend(ABC):
    name: str
    records: bool = False  # whether its work can be recorded and replayed
    max_head_dim: int | None = None  # None: any

    def recorder(self) -> SizedRecorder | None:
        """What records steps on the platform of this backend, if there is such a thing."""
        return None

    @classmethod
    def refuses(cls, dtype: torch.dtype) -> str | None:
        """Why it cannot serve this type of activations on this machine; None if it can. May build kernels."""
        return None

    def start(self) -> None:
        """Prepare the process for its kernels. Called once per engine, after the platform has started."""
        return None

    def kv_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """Types that the cache may have beside activations of `dtype`, the default first."""
        return (dtype,)

    @abstractmethod
    def cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32
    ) -> tuple[int, ...]:
        """Shape of one layer's cache tensor of this type, keys and values together."""

    @abstractmethod
    def workspace_bytes(self, spec: AttentionSpec, max_model_len: int, itemsize: int) -> int:
        """Most memory that attention takes beside its arguments and result."""

    def parts_bytes(self, spec: AttentionSpec, max_rows: int, max_model_len: int) -> int:
        """What is added to that where programs share a row's keys, and so in no step of whole prompts."""
        return 0

    @abstractmethod
    def heal(self, cache: Tensor, block_ids: Tensor) -> None:
        """Replace every value of these blocks that is not finite by zero. block_ids: [n] int64. Mutates `cache`."""

    def note_finite(self, values: Tensor, out: Tensor) -> None:
        """Write into out [n] bool whether all of each row of values [n, width] is finite.

        A row whose sum overflows may count as not finite: a sum is finite only if all that it adds is.
        """
        out.copy_(values.sum(-1, dtype=torch.float32).isfinite())

    @abstractmethod
    def prepare(self, batch: AttentionBatch) -> AttentionMetadata:
        """Once per step and KV group. Does not sync the device."""

    @abstractmethod
    def write(
        self,
        spec: AttentionSpec,
        qkv: Tensor,
        head_norm: HeadNorm | None,
        rotation: Rotation,
        cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Norm and rotate query and key heads, and write keys and values into the cache. Mutates `cache` only.

        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]. Returns the queries [num_tokens, heads, dim].
        """

    def write_parts(
        self,
        spec: AttentionSpec,
        qkv: Parts,
        head_norm: HeadNorm | None,
        rotation: Rotation,
        cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """The same of a product in parts."""
        return self.write(spec, qkv.summed(), head_norm, rotation, cache, metadata)

    @abstractmethod
    def attend(self, spec: AttentionSpec, query: Tensor, cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        """query: [num_tokens, num_heads, head_dim] -> [num_tokens, num_heads * head_dim]; padding is undefined."""
