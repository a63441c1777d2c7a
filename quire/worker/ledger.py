"""The memory ledger: every large allocation is declared here before it is taken, or refused with the fix."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kv.layout import KVLayout
from quire.types.errors import MemoryPlanError
from quire.utils.units import format_bytes

# Blocks below this many tokens are not worth serving with; the refusal names the memory that is missing.
MIN_CONTEXT = 128


@dataclass(frozen=True)
class LedgerEntry:
    name: str
    num_bytes: int
    note: str


@dataclass(frozen=True)
class MemoryLedger:
    """What will be taken, and what there is."""

    entries: tuple[LedgerEntry, ...]
    supply: int
    max_model_len: int
    max_model_len_reason: str
    num_kv_blocks: int
    layout: KVLayout

    @property
    def total(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)

    def format(self) -> str:
        """A table for people."""
        lines = [f"{entry.name:<12} {format_bytes(entry.num_bytes):>10}  {entry.note}" for entry in self.entries]
        lines.append(f"{'total':<12} {format_bytes(self.total):>10}  of {format_bytes(self.supply)} available")
        lines.append(f"max_model_len = {self.max_model_len} ({self.max_model_len_reason})")
        return "\n".join(lines)


@dataclass(frozen=True)
class MemoryDemand:
    """What the model and the settings need, before KV blocks."""

    weights: int
    weights_note: str
    rows: int
    workspace: int
    layout: KVLayout
    trained_len: int
    max_num_batched_tokens: int
    max_num_seqs: int

    @property
    def fixed(self) -> int:
        return self.weights + self.rows + self.workspace

    def kv_bytes(self, num_tokens: int) -> int:
        """KV memory in which one request of this many tokens can run, the null block included."""
        return (self.layout.blocks_for(num_tokens, self.max_num_batched_tokens) + 1) * self.layout.page_bytes

    def longest(self, kv_memory: int) -> int:
        """The longest request that fits into so much KV memory, at most what the model was trained for."""
        low, high = 0, self.trained_len
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.kv_bytes(middle) <= kv_memory else (low, middle - 1)
        return low


def make_ledger(
    demand: MemoryDemand, supply: int, kv_memory: int | None, default_kv_memory: int, max_model_len: int | None
) -> MemoryLedger:
    """Decide KV memory and context length; raise MemoryPlanError with the cheapest fix if something cannot be."""
    left = supply - demand.fixed
    wanted = kv_memory if kv_memory is not None else max(0, default_kv_memory)
    if kv_memory is None and max_model_len is not None:
        wanted = max(wanted, demand.kv_bytes(max_model_len))
    longest = demand.longest(wanted)
    if max_model_len is not None:
        _check_length(demand, max_model_len, longest, kv_memory)
        length, reason = max_model_len, "set by the user"
    elif longest == demand.trained_len:
        length, reason = longest, "what the model was trained for"
    else:
        length = longest
        reason = f"the KV memory holds no longer request; the model was trained for {demand.trained_len}"
    if wanted > left or length < min(MIN_CONTEXT, demand.trained_len):
        raise _does_not_fit(demand, supply, wanted, max(length, min(MIN_CONTEXT, demand.trained_len)))
    # More blocks than all rows can fill at once would never be used.
    useful = demand.max_num_seqs * (demand.kv_bytes(length) // demand.layout.page_bytes)
    num_blocks = (
        min(wanted // demand.layout.page_bytes, useful) if kv_memory is None else wanted // (demand.layout.page_bytes)
    )
    tokens = num_blocks * demand.layout.block_size // len(demand.layout.groups)
    return MemoryLedger(
        entries=(
            LedgerEntry("weights", demand.weights, demand.weights_note),
            LedgerEntry("KV blocks", num_blocks * demand.layout.page_bytes, f"{num_blocks} blocks, {tokens} tokens"),
            LedgerEntry("rows", demand.rows, f"{demand.max_num_seqs} requests at once"),
            LedgerEntry("workspace", demand.workspace, f"steps of {demand.max_num_batched_tokens} tokens"),
        ),
        supply=supply,
        max_model_len=length,
        max_model_len_reason=reason,
        num_kv_blocks=num_blocks,
        layout=demand.layout,
    )


def _check_length(demand: MemoryDemand, max_model_len: int, longest: int, kv_memory: int | None) -> None:
    if max_model_len > demand.trained_len:
        raise MemoryPlanError(
            f"max_model_len is {max_model_len} but the model was trained for {demand.trained_len} tokens; "
            f"set --max-model-len to {demand.trained_len} or less"
        )
    if kv_memory is not None and max_model_len > longest:
        needed = format_bytes(demand.kv_bytes(max_model_len))
        raise MemoryPlanError(
            f"one request of {max_model_len} tokens needs {needed} of KV blocks but kv_cache_memory is "
            f"{format_bytes(kv_memory)}; set --max-model-len {longest} or --kv-cache-memory {needed}"
        )


def _does_not_fit(demand: MemoryDemand, supply: int, wanted: int, length: int) -> MemoryPlanError:
    need = (
        f"weights {format_bytes(demand.weights)}, rows and workspace {format_bytes(demand.rows + demand.workspace)}, "
        f"KV blocks {format_bytes(max(wanted, demand.kv_bytes(length)))}"
    )
    left = supply - demand.fixed
    shorter = demand.longest(max(0, left))
    if shorter >= min(MIN_CONTEXT, demand.trained_len):
        fix = f"set --kv-cache-memory {format_bytes(left // (1 << 20) * (1 << 20))} --max-model-len {shorter}"
    elif demand.weights < supply:
        fix = "lower --max-num-batched-tokens or --max-num-seqs, or free some memory"
    else:
        fix = "use a smaller model or --dtype bfloat16, or a machine with more memory"
    return MemoryPlanError(f"not enough memory: needed {need}; available {format_bytes(supply)}; {fix}")
