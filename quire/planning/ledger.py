"""The memory ledger: every large allocation is declared here before it is taken, or refused with the fix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.kv.layout import KVLayout
from quire.platform.base import DefaultMemory, MemorySupply
from quire.types.errors import MemoryPlanError
from quire.types.ledger import LedgerLine
from quire.utils.units import exact_bytes, format_bytes

# The shortest context worth serving with, unless the user asks for a shorter one.
MIN_CONTEXT = 128
# Suggested sizes are rounded to this where that changes nothing.
ROUND_TO = 1 << 20


@dataclass(frozen=True)
class MemoryLedger:
    """What will be taken, and what there is."""

    entries: tuple[LedgerLine, ...]
    supply: MemorySupply
    max_model_len: int
    max_model_len_reason: str
    pool_blocks: tuple[int, ...]  # KV blocks of each of the layout's pools
    kv_reason: str  # the reason for the size, with the setting that changes it
    layout: KVLayout
    is_cut: bool = False  # requests of the length that the model was trained for do not fit

    @property
    def total(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def kv_bytes(self) -> int:
        return self.layout.num_bytes(self.pool_blocks)

    @property
    def num_kv_blocks(self) -> int:
        return sum(self.pool_blocks)

    @property
    def num_kv_tokens(self) -> int:
        return self.layout.num_tokens(self.pool_blocks)

    def room(self, num_tokens: int) -> int:
        """How many of a request's `num_tokens` the smallest pool that keeps tokens has room for."""
        kept = (
            count - 1 for count, pool in zip(self.pool_blocks, self.layout.pools, strict=True) if not pool.per_row
        )
        return min(num_tokens, *(count * self.layout.block_size for count in kept), num_tokens)

    def format(self) -> str:
        """A table for people."""
        reason = f"max_model_len = {self.max_model_len} ({self.max_model_len_reason})"
        return "\n".join([*_table(self.entries, self.supply), f"KV blocks: {self.kv_reason}", reason])

    def ran_out(self, error: Exception) -> MemoryPlanError:
        """What to raise when memory that was planned could not be had."""
        return MemoryPlanError(
            f"memory ran out while the engine took what it had planned ({error}); {self.supply.more}, or set"
            f" --kv-cache-memory to less than {format_bytes(self.kv_bytes)}\n"
            + "\n".join(_table(self.entries, self.supply))
        )


@dataclass(frozen=True)
class MemoryDemand:
    """What the model and the settings need, before KV blocks."""

    weights: LedgerLine
    parts: tuple[LedgerLine, ...]  # all else that the engine takes
    layout: KVLayout
    trained_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    others: tuple[LedgerLine, ...] = ()  # left to other processes
    state_cache_size: int | None = None  # bytes for checkpoints of states

    def entries(self, num_blocks: Sequence[int]) -> tuple[LedgerLine, ...]:
        """The lines of a ledger with this many KV blocks of each pool."""
        layout = self.layout
        states = [n if pool.per_row else 0 for n, pool in zip(num_blocks, layout.pools, strict=True)]
        tokens = [n - of_states for n, of_states in zip(num_blocks, states, strict=True)]
        lines = []
        if any(tokens):
            blocks = f"{sum(tokens)} blocks, {layout.num_tokens(num_blocks)} tokens"
            lines.append(LedgerLine("KV blocks", layout.num_bytes(tokens), blocks))
        if any(states):
            note = f"{sum(states)} of recurrent layers: of running requests, and checkpoints"
            lines.append(LedgerLine("states", layout.num_bytes(states), note))
        return (self.weights, *lines, *self.parts, *self.others)

    @property
    def fixed(self) -> int:
        return sum(line.num_bytes for line in (self.weights, *self.parts)) + self.reserved

    @property
    def reserved(self) -> int:
        return sum(line.num_bytes for line in self.others)

    def kv_bytes(self, num_tokens: int) -> int:
        """KV memory in which one request of this many tokens can run, the null block included."""
        return self.layout.bytes_for(num_tokens, self.max_num_batched_tokens)

    def pool_blocks(self, kv_memory: int, num_tokens: int) -> tuple[int, ...]:
        """Blocks of each pool in `kv_memory` bytes, for requests of up to `num_tokens`."""
        return self.layout.num_blocks_for(
            kv_memory, num_tokens, self.max_num_batched_tokens, self.max_num_seqs, self.state_cache_size
        )

    def num_rows(self, ledger: MemoryLedger) -> int:
        """Requests that run at once: those that have room for their states."""
        rows = self.layout.num_rows(ledger.pool_blocks, ledger.max_model_len, self.max_num_batched_tokens)
        return min(rows, self.max_num_seqs)

    def longest(self, kv_memory: int) -> int:
        """The longest request that fits into so much KV memory, at most what the model was trained for."""
        low, high = 0, self.trained_len
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.kv_bytes(middle) <= kv_memory else (low, middle - 1)
        return low


def make_ledger(
    demand: MemoryDemand,
    supply: MemorySupply,
    kv_memory: int | None,
    default_kv_memory: DefaultMemory,
    max_model_len: int | None,
) -> MemoryLedger:
    """Decide KV memory and context length; raise MemoryPlanError with the cheapest fix if something cannot be."""
    shortest = min(MIN_CONTEXT, demand.trained_len) if max_model_len is None else max_model_len
    _check_length(demand, shortest, kv_memory, max_model_len)
    least = DefaultMemory(demand.kv_bytes(shortest), f"one request of {shortest} tokens")
    default = max(default_kv_memory, least, key=lambda memory: memory.num_bytes)
    wanted = default.num_bytes if kv_memory is None else kv_memory
    if wanted > supply.num_bytes - demand.fixed:
        raise _does_not_fit(demand, supply, wanted, shortest, kv_memory, max_model_len)
    length, reason = demand.longest(wanted), "what the model was trained for"
    if max_model_len is not None:
        length, reason = max_model_len, "set by the user"
    elif length < demand.trained_len:
        reason = f"the KV memory holds no longer request; the model was trained for {demand.trained_len}"
    kv_reason = "--kv-cache-memory, set by the user"
    if kv_memory is None:  # more blocks than all rows can fill at once would never be used
        all_rows = demand.max_num_seqs * demand.kv_bytes(length)
        why = default.reason if wanted <= all_rows else f"all that {demand.max_num_seqs} requests can fill"
        wanted, kv_reason = min(wanted, all_rows), f"{why}, by default; --kv-cache-memory changes it"
    num_blocks = demand.pool_blocks(wanted, length)
    return MemoryLedger(
        entries=demand.entries(num_blocks),
        supply=supply,
        max_model_len=length,
        max_model_len_reason=reason,
        pool_blocks=num_blocks,
        kv_reason=kv_reason,
        layout=demand.layout,
        is_cut=max_model_len is None and length < demand.trained_len,
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
    demand: MemoryDemand,
    supply: MemorySupply,
    wanted: int,
    shortest: int,
    kv_memory: int | None,
    max_model_len: int | None,
) -> MemoryPlanError:
    left, needed = max(0, supply.num_bytes - demand.fixed), demand.kv_bytes(shortest)
    rounded = left // ROUND_TO * ROUND_TO
    if left >= needed:  # so the user asked for more KV memory than that
        fix = f"set --kv-cache-memory {exact_bytes(rounded if rounded >= needed else left)}"
    elif max_model_len is not None and demand.longest(left) > 0:
        given = rounded if demand.longest(rounded) > 0 else left
        lower_kv = "" if kv_memory is None else f"--kv-cache-memory {exact_bytes(given)} "
        fix = f"set {lower_kv}--max-model-len {demand.longest(given)}"
    elif left + demand.reserved >= needed:
        fix = f"{supply.more}, lower --reserved-memory, or set --no-spare-engine if it serves one model"
    elif demand.weights.num_bytes < supply.num_bytes:
        fix = f"lower --max-model-len, --max-num-batched-tokens or --max-num-seqs, or {supply.more}"
    else:
        fix = f"use a smaller model, keep its weights smaller with --quantization, or {supply.more}"
    table = _table(demand.entries(demand.pool_blocks(wanted, shortest)), supply)
    return MemoryPlanError(
        f"not enough memory: needed {format_bytes(demand.fixed + wanted)}; available {format_bytes(supply.num_bytes)}"
        f" ({supply.bound}); {fix}\n" + "\n".join(table)
    )


def _table(entries: tuple[LedgerLine, ...], supply: MemorySupply) -> list[str]:
    total = sum(entry.num_bytes for entry in entries)
    width = max(12, *(len(entry.name) for entry in entries))
    available = f"of {format_bytes(supply.num_bytes)} available ({supply.bound})"
    return [
        *(f"{entry.name:<{width}} {format_bytes(entry.num_bytes):>10}  {entry.note}" for entry in entries),
        f"{'total':<{width}} {format_bytes(total):>10}  {available}",
    ]


def _rounded_up(num_bytes: int) -> int:
    return -(-num_bytes // ROUND_TO) * ROUND_TO
