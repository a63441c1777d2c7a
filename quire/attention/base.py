"""What an attention backend is: it owns the layout of the KV cache and computes attention over it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.fp8 import FP8
from quire.ops.latent import INDEX_SCALE
from quire.ops.split_k import PartialSums
from quire.parallel.groups import ContextShare
from quire.platform.recording import SizedRecorder
from quire.platform.transfer import upload
from quire.types.errors import ConfigError
from quire.types.ledger import EngineSizes, LedgerLine

Rotation = tuple[Tensor, Tensor] | None  # cos and sign-folded sin of a step, [n, 1, rotary_dim]; None: no rotation


@dataclass(frozen=True)
class AttentionSpec:
    """What one layer asks of attention; fixed when the model is built."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None  # a query sees itself and window - 1 tokens before it, or on both sides
    soft_cap: float | None = None  # scores become cap * tanh(scores / cap)
    sinks: Tensor | None = field(default=None, compare=False)
    """[num_heads] float32: for each head the score of a key that all queries see and that has no value."""
    norms_rotated: bool = False  # whether heads are normed after the rotation
    causal: bool = True  # False: a query sees its whole prompt, which is computed in one step
    value_dim: int | None = None  # latent: a value is the first dimensions of its key; None: it is kept apart
    index_dim: int = 0  # latent: of the key of a sparse indexer, which is kept after the latent
    top_k: int | None = None  # keys that a query attends to, as its or an earlier indexer chooses; None: all
    chunked: bool = False  # a query sees the tokens of its own chunk of `sliding_window` tokens, up to itself
    kv_scales: tuple[float, float] = (1.0, 1.0)  # what keys and values are divided by in a cache of fp8

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def kernel_window(self) -> int:
        """The window as kernels take it: 0 for none, and the size of chunks with a minus."""
        window = self.sliding_window or 0
        return -window if self.chunked else window

    def line_width(self, dtype: torch.dtype) -> int:
        """Numbers of a head in a cache of this type, with what a sparse indexer keeps behind them."""
        return self.head_dim + self.index_dim + (INDEX_SCALE if self.index_dim and dtype == FP8 else 0)

    def first_seen(self, positions: Tensor) -> Tensor:
        """The first key that queries at these positions see."""
        if self.sliding_window is None:
            return torch.zeros_like(positions)
        if self.chunked:
            return positions // self.sliding_window * self.sliding_window
        return (positions - self.sliding_window + 1).clamp_min(0)


class HeadNorm(NamedTuple):
    """RMS norm of each query and key head, before the rotation unless the layer's spec says after it."""

    q_weight: Tensor  # [head_dim]
    k_weight: Tensor  # [head_dim]
    eps: float
    weight_offset: float


NO_HEAD_NORM = (None, None, 0.0, 0.0)  # in place of a HeadNorm's fields


class HostLengths(NamedTuple):
    """Lengths of a step's rows as the host knows them."""

    queries: list[int]  # tokens of each row in this step
    contexts: list[int]  # KV length of each row after this step
    attended: list[int] | None = None  # as in an AttentionBatch; None: all of each row


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The rows of one step as one KV group sees them.

    Tokens of a row are contiguous and rows are in batch order; the token dimension may be padded at the end.
    Padding tokens have slot < block_size (block 0, the null block) and belong to no row.
    """

    tables: Tensor  # [max_rows, max_blocks] int32, block ids of every row there is
    rows: Tensor  # [num_rows] int64, which lines of `tables` these are
    contexts: Tensor  # [num_rows] int32, KV length of each row after this step
    query_starts: Tensor  # [num_rows + 1] int32, index of each row's first token
    slot_mapping: Tensor  # [num_tokens_padded] int64: block_id * block_size + offset
    block_size: int
    num_tokens: int  # without padding; in a captured step, as many as there may be
    max_context: int  # no context is longer
    padding_row: int = -1  # what `rows` is padded with
    lengths: HostLengths | None = None  # None in a captured step, whose lengths only the device knows
    # [num_rows] int32: under bidirectional attention, how many of its first tokens each row attends to; None: all
    attended: Tensor | None = None

    def known_lengths(self) -> HostLengths:
        """The lengths of the rows; waits for the device if it alone knows them, so never in a captured step."""
        return self.lengths or HostLengths(self.query_starts.diff().tolist(), self.contexts.tolist())


class WorkPlan(NamedTuple):
    """How a backend divides the rows of a step among its kernels, made on the host."""

    kind: Hashable = None  # which kernels run: captured steps of one size and kind are the same graph
    lists: tuple[list[int], ...] = ()  # what these kernels read about the rows, besides the batch


def make_batch(
    query_lens: list[int], context_lens: list[int], block_tables: Tensor, slot_mapping: Tensor, block_size: int
) -> AttentionBatch:
    """A batch whose rows are the lines of `block_tables` [num_rows, max_blocks]."""
    device = block_tables.device
    starts = torch.tensor([0, *query_lens], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    return AttentionBatch(
        tables=block_tables,
        rows=torch.arange(len(query_lens), device=device),
        contexts=torch.tensor(context_lens, dtype=torch.int32, device=device),
        query_starts=starts,
        slot_mapping=slot_mapping,
        block_size=block_size,
        num_tokens=sum(query_lens),
        max_context=max(context_lens),
        lengths=HostLengths(query_lens, context_lens),
    )


class Written(NamedTuple):
    """Queries that are ready for attention, and keys and values of this step where a kernel reads them directly."""

    query: Tensor  # [num_tokens, num_heads, head_dim]
    keys: Tensor | None = None  # [num_tokens, num_kv_heads, head_dim]
    values: Tensor | None = None
    of_index: tuple[Tensor, Tensor] | None = None  # of a sparse indexer: queries [n, heads, dim], and their weights


class AttentionMetadata(ABC):  # noqa: B024  each backend adds its own fields; callers treat it as opaque
    """Whatever a backend prepares once per step and group and reads in every layer."""

    # Which keys each token attends to, left by the last layer with a sparse indexer; two parts have a row for each.
    choice: tuple[Tensor, ...] | None = None


class LayerCache(NamedTuple):
    """Attention of one layer in one step: what it asks for, its keys and values, and what was prepared."""

    spec: AttentionSpec
    cache: Tensor
    metadata: AttentionMetadata


class GroupBackend(ABC):
    """What a KV group needs in a step: attention, or where its states are."""

    def note_finite(self, values: Tensor, out: Tensor) -> None:
        """Write into out [n] bool whether all of each row of values [n, width] is finite.

        A row whose sum overflows may count as not finite: a sum is finite only if all that it adds is.
        """
        out.copy_(values.sum(-1, dtype=torch.float32).isfinite())

    def divide(self, lengths: HostLengths) -> WorkPlan:
        """Which kernels take which rows of a step. Host only."""
        return WorkPlan()

    def decode_kind(self, contexts: list[int] | None, num_rows: int) -> Hashable:
        """The kind of a step of one query a row, which needs no lists; `contexts` if the host knows them."""
        return None

    def list_lengths(self, num_tokens: int, max_rows: int) -> tuple[int, ...]:
        """The longest that lists of a WorkPlan get in captured steps; those that need longer ones run eagerly."""
        return ()

    def usual_kinds(self, num_tokens: int, max_context: int, is_full: bool) -> Sequence[Hashable]:
        """Kinds of mixed steps that nearly every engine of this longest context comes to."""
        return ()

    def captures(self, work: WorkPlan, num_tokens: int) -> bool:
        """Whether a captured step, padded to this number of tokens, can be divided like this."""
        return True

    @abstractmethod
    def prepare(self, batch: AttentionBatch, kind: Hashable, lists: tuple[Tensor, ...]) -> AttentionMetadata:
        """Once per step and KV group, with a WorkPlan whose lists are on the device. Does not sync it."""

    def prepare_eager(self, batch: AttentionBatch) -> AttentionMetadata:
        """The same for a batch whose lengths the host knows."""
        assert batch.lengths is not None
        work = self.divide(batch.lengths)
        device = batch.rows.device
        return self.prepare(batch, work.kind, tuple(upload(values, device) for values in work.lists))


class AttentionBackend(GroupBackend):
    name: str
    records: bool = False  # whether its work can be recorded and replayed
    block_axis: int = 1  # of a cache tensor
    whole_prompts: bool = False  # every layer attends in both directions, over the tokens of its step
    max_head_dim: int | None = None  # None: any
    query_tile: int = 1  # tokens of a prompt that a program computes together: fewer take as long

    @property
    def instruction_set(self) -> str:
        """What its kernels were compiled for, where one machine has several; "" where that is no question."""
        return ""

    def recorder(self) -> SizedRecorder | None:
        """What records steps on the platform of this backend, if there is such a thing."""
        return None

    @classmethod
    def refuses(cls, dtype: torch.dtype) -> str | None:
        """Why it cannot serve this type of activations on this machine; None if it can. May build kernels."""
        return None

    def lacks(self, spec: AttentionSpec) -> str | None:
        """What a layer asks for and this backend does not do; None if it does all."""
        return None

    def captures_spec(self, spec: AttentionSpec, dtype: torch.dtype) -> bool:
        """Whether CUDA graphs can hold such a layer's attention."""
        return self.records

    def start(self) -> None:
        """Prepare the process for its kernels. Called once per engine, after the platform has started."""
        return None

    def share_context(self, share: ContextShare) -> None:
        """Keep this rank's part of every block, and attend over those of all ranks. Before anything is kept."""
        raise ConfigError(
            f"decode_context_parallel_size is {share.size}, but {type(self).__name__} keeps every token on each rank;"
            " contexts are split by dense and latent attention on a CPU (cpu_native), so leave it out"
        )

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

    def contributes(self, spec: AttentionSpec, sizes: EngineSizes) -> Iterable[LedgerLine]:
        """What a layer's attention takes."""
        workspace = self.workspace_bytes(spec, sizes.max_model_len, sizes.itemsize)
        yield LedgerLine("attention", workspace, "the longest context of a layer", in_step=True)
        sums = self.parts_bytes(spec, sizes.max_num_seqs, sizes.max_model_len)
        yield LedgerLine("attention sums", sums, "of programs that share a row's keys")

    def heal(self, cache: Tensor, block_ids: Tensor) -> None:
        """Replace every value of these blocks that is not finite by zero. block_ids: [n] int64. Mutates `cache`."""
        index: tuple[slice | Tensor, ...] = (*[slice(None)] * self.block_axis, block_ids)
        if cache.dtype.itemsize == 1:  # fp8 has no infinities, and one NaN of either sign
            bits = cache.view(torch.uint8)[index]
            cache.view(torch.uint8)[index] = torch.where(bits & 0x7F == 0x7F, 0, bits)
        else:
            cache[index] = cache[index].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    @abstractmethod
    def write(self, at: LayerCache, qkv: Tensor, head_norm: HeadNorm | None, rotation: Rotation) -> Written:
        """Norm and rotate query and key heads, and write keys and values into the cache. Mutates the cache only.

        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim].
        """

    def write_partial_sums(
        self, at: LayerCache, qkv: PartialSums, head_norm: HeadNorm | None, rotation: Rotation
    ) -> Written:
        """The same of a product in parts."""
        return self.write(at, qkv.summed(), head_norm, rotation)

    @abstractmethod
    def attend(self, at: LayerCache, written: Written) -> Tensor:
        """[num_tokens, num_heads * head_dim], of what `write` returned; padding is undefined."""
