"""The memory ledger: every large allocation is declared here before it is taken, or refused with the fix."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kv.layout import KVLayout
from quire.types.errors import MemoryPlanError
from quire.utils.units import exact_bytes, format_bytes

# The shortest context worth serving with, unless the user asks for a shorter one.
MIN_CONTEXT = 128
# Suggested sizes are rounded to this where that changes nothing.
ROUND_TO = 1 << 20


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
    reserved: int = 0  # for others

    @property
    def fixed(self) -> int:
        return self.weights + self.rows + self.workspace + self.reserved

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
    shortest = min(MIN_CONTEXT, demand.trained_len) if max_model_len is None else max_model_len
    _check_length(demand, shortest, kv_memory, max_model_len)
    wanted = max(default_kv_memory, demand.kv_bytes(shortest)) if kv_memory is None else kv_memory
    if wanted > supply - demand.fixed:
        raise _does_not_fit(demand, supply, wanted, shortest, kv_memory, max_model_len)
    length, reason = demand.longest(wanted), "what the model was trained for"
    if max_model_len is not None:
        length, reason = max_model_len, "set by the user"
    elif length < demand.trained_len:
        reason = f"the KV memory holds no longer request; the model was trained for {demand.trained_len}"
    num_blocks = wanted // demand.layout.page_bytes
    if kv_memory is None:  # more blocks than all rows can fill at once would never be used
        num_blocks = min(num_blocks, demand.max_num_seqs * (demand.kv_bytes(length) // demand.layout.page_bytes))
    tokens = num_blocks * demand.layout.block_size // len(demand.layout.groups)
    others = (LedgerEntry("reserved", demand.reserved, "left to other processes"),) if demand.reserved else ()
    return MemoryLedger(
        entries=(
            LedgerEntry("weights", demand.weights, demand.weights_note),
            LedgerEntry("KV blocks", num_blocks * demand.layout.page_bytes, f"{num_blocks} blocks, {tokens} tokens"),
            LedgerEntry("rows", demand.rows, f"{demand.max_num_seqs} requests at once"),
            LedgerEntry("workspace", demand.workspace, f"steps of {demand.max_num_batched_tokens} tokens"),
            *others,
        ),
        supply=supply,
        max_model_len=length,
        max_model_len_reason=reason,
        num_kv_blocks=num_blocks,
        layout=demand.layout,
    )


def check_trained(length: int, trained_len: int) -> None:
    """Refuse contexts that the model knows nothing of."""
    if length > trained_len:
        raise MemoryPlanError(
            f"max_model_len is {length} but the model was trained for {trained_len} tokens; "
            f"set --max-model-len {trained_len} or less"
        )


def _check_length(demand: MemoryDemand, shortest: int, kv_memory: int | None, max_model_len: int | None) -> None:
    """Refuse what cannot be on a machine of any size."""
    check_trained(shortest, demand.trained_len)
    needed = demand.kv_bytes(shortest)
    if kv_memory is None or kv_memory >= needed:
        return
    longest = demand.longest(kv_memory)
    shorten = f"--max-model-len {longest} or " if max_model_len is not None and longest > 0 else ""
    raise MemoryPlanError(
        f"kv_cache_memory is {format_bytes(kv_memory)} but one request of {shortest} tokens needs "
        f"{format_bytes(needed)} of KV blocks; set {shorten}--kv-cache-memory {exact_bytes(_rounded_up(needed))}"
    )


def _does_not_fit(
    demand: MemoryDemand, supply: int, wanted: int, shortest: int, kv_memory: int | None, max_model_len: int | None
) -> MemoryPlanError:
    left, needed = max(0, supply - demand.fixed), demand.kv_bytes(shortest)
    rounded = left // ROUND_TO * ROUND_TO
    if left >= needed:  # so the user asked for more KV memory than that
        fix = f"set --kv-cache-memory {exact_bytes(rounded if rounded >= needed else left)}"
    elif max_model_len is not None and demand.longest(left) > 0:
        given = rounded if demand.longest(rounded) > 0 else left
        lower_kv = "" if kv_memory is None else f"--kv-cache-memory {exact_bytes(given)} "
        fix = f"set {lower_kv}--max-model-len {demand.longest(given)}"
    elif left + demand.reserved >= needed:
        fix = "lower --reserved-memory, and set --no-spare-engine if it serves"
    elif demand.weights < supply:
        fix = "lower --max-model-len, --max-num-batched-tokens or --max-num-seqs, or free some memory"
    else:
        fix = "use a smaller model, keep its weights smaller with --quantization, or use a machine with more memory"
    reserved = f", reserved {format_bytes(demand.reserved)}" if demand.reserved else ""
    return MemoryPlanError(
        f"not enough memory: needed {format_bytes(demand.fixed + wanted)} (weights {format_bytes(demand.weights)}, "
        f"rows and workspace {format_bytes(demand.rows + demand.workspace)}, KV blocks {format_bytes(wanted)}"
        f"{reserved}); available {format_bytes(supply)}; {fix}"
    )


def _rounded_up(num_bytes: int) -> int:
    return -(-num_bytes // ROUND_TO) * ROUND_TO
