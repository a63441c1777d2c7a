"""ParallelGroup: which slice of a layer this process holds. Knows ranks, not devices or transports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from quire.parallel.collectives import Collectives, NullCollectives
from quire.types.errors import ConfigError


@dataclass(frozen=True)
class ContextShare:
    """The ranks that split the tokens of the KV heads they all hold; by default one, which keeps every token.

    Of each block of tokens the rank keeps its part in order.
    """

    rank: int = 0
    size: int = 1
    collectives: Collectives = field(default_factory=NullCollectives)


class RowSplit:
    """Whether the step that runs holds its residual stream by rows (sequence parallel)."""

    num_tokens = 0  # of that step; 0: it does not

    @contextmanager
    def of_step(self, num_tokens: int) -> Iterator[None]:
        self.num_tokens = num_tokens
        try:
            yield
        finally:
            self.num_tokens = 0


@dataclass(frozen=True)
class ParallelGroup:
    """The ranks that share one layer; the default is a group of one."""

    rank: int = 0
    size: int = 1
    collectives: Collectives = field(default_factory=NullCollectives)
    exact: bool = False  # whether sums over ranks are to have the same bits for 1, 2, 4 and 8 of them
    splits_experts: bool = False  # whether a rank holds some of the experts whole, or a slice of each
    expert_exchange: str = "all_reduce"  # the all2all_backend, or "replicas"
    counts_experts: bool = False  # whether layers count how often each of their experts is chosen
    num_redundant_experts: int = 0  # slots of experts in each layer beyond one for each
    context: ContextShare = field(default_factory=ContextShare)
    row_threshold: int = 0  # tokens of a step from which on ranks hold its residual stream by rows; 0: they never do
    rows: RowSplit = field(default_factory=RowSplit)
    replicas: ParallelGroup | None = None  # those that this group's experts are divided over; None: its own ranks

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank {self.rank} is not in a parallel group of size {self.size}")

    def splits_rows(self, num_tokens: int) -> bool:
        """Whether ranks hold the residual stream of a step of this many tokens by rows (sequence parallel)."""
        return 0 < self.row_threshold <= num_tokens

    def slice_of(self, total: int, what: str) -> tuple[int, int]:
        """(start, size) of this rank's equal share of `total`; `what` names it in the refusal."""
        if total % self.size:
            raise ConfigError(
                f"{what} ({total}) cannot be split over {self.size} ranks; "
                f"choose a tensor parallel size that divides {total}"
            )
        share = total // self.size
        return self.rank * share, share

    def check_context(self, kv_heads: int) -> None:
        """Refuse a split of contexts over more ranks than hold a KV head."""
        sharing = self.size // kv_heads if self.size > kv_heads else 1
        if sharing % self.context.size:
            raise ConfigError(
                f"decode_context_parallel_size is {self.context.size}, but with {kv_heads} KV heads on {self.size}"
                f" ranks a head is held by {sharing}; choose a divisor of that, or leave it out"
            )

    def share_of(self, total: int, what: str) -> tuple[int, int]:
        """(start, size) of this rank's share, rounded up, of what need not divide evenly; the last may have less."""
        share = -(-total // self.size)
        if share * (self.size - 1) >= total:
            raise ConfigError(f"{what} ({total}) is too small for {self.size} ranks; choose fewer")
        return self.rank * share, min(share, total - self.rank * share)
