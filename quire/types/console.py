"""What the console is shown of an engine: a view of its requests, steps and KV blocks. Tokens are counts here.

The engine makes a view when it is asked (control verb `console`); the server adds what it knows and sends frames at
/console/events. Times are seconds since 1970, so that the views of several processes can be laid side by side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

EventKind = Literal["started", "resumed", "chunk", "preempted"]
Phase = Literal["held", "parked", "queued", "preempted", "prefill", "decode"]


class ConsoleQuery(msgspec.Struct, frozen=True):
    """What is wanted: what is new since the steps and events of these numbers."""

    after_step: int = -1
    after_event: int = -1
    stop: bool = False  # nobody looks any more: record nothing


class RequestView(msgspec.Struct, frozen=True, omit_defaults=True):
    """One completion that has not ended."""

    id: str
    phase: Phase
    since: float  # when it arrived
    num_prompt_tokens: int
    num_tokens: int  # known: prompt and outputs
    num_computed: int  # tokens whose KV is in blocks, or in flight
    max_tokens: int = 0  # known tokens at which it ends at the latest
    why: str = ""  # why it waits
    row: int = -1
    num_cached: int = -1  # prompt tokens that the prefix cache had; -1: it has not begun
    num_blocks: int = 0
    num_preemptions: int = 0
    priority: int = 0
    grammar: bool = False
    prompt: str | None = None  # with --console-show-text, set by the server


class StepView(msgspec.Struct, frozen=True, array_like=True):
    """One finished step."""

    id: int
    at: float  # when its result came
    seconds: float  # how long it kept the device
    num_rows: int
    num_tokens: int  # computed
    num_prompt_tokens: int  # those of them that are not the next token of a request that decodes
    way: str  # how it ran: eager, CUDA graph, kernel list


class EventView(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened to a request."""

    number: int
    at: float
    request_id: str
    kind: EventKind
    value: int = 0  # started, resumed: cached tokens; chunk: tokens of it
    total: int = 0  # started, resumed: known tokens; chunk: computed tokens after it


class PoolView(msgspec.Struct, frozen=True):
    """The blocks of one pool as a map. A cell stands for `cell_blocks` blocks, of which it tells the commonest state.

    States, a digit per cell: 0 free, 1 cached and unused, 2 used by one request, 3 used by several.
    """

    num_blocks: int
    num_free: int  # unused ones, cached or not
    num_cached: int  # that a prompt could start from, used or not
    cell_blocks: int
    states: str
    owners: list[int]  # row of the request that uses a cell in state 2; -1: unknown or none


class PrefixNode(msgspec.Struct, frozen=True, array_like=True):
    """A run of cached blocks that follow each other without a fork; nodes come after their parents."""

    id: int
    parent: int  # -1: a prompt begins here
    num_blocks: int
    num_used: int  # by requests that run
    num_below: int  # blocks of all nodes below


class MemoryLine(msgspec.Struct, frozen=True, array_like=True):
    """A line of the memory ledger."""

    name: str
    num_bytes: int
    note: str


class Memory(msgspec.Struct, frozen=True):
    """The memory ledger of an engine."""

    lines: list[MemoryLine] = []
    supply: int = 0


class EngineView(msgspec.Struct, frozen=True):
    """An engine between two steps."""

    at: float = 0.0
    requests: list[RequestView] = []
    num_more_waiting: int = 0  # that are not among them
    steps: list[StepView] = []
    events: list[EventView] = []
    pools: list[PoolView] = []
    prefixes: list[PrefixNode] = []
    num_more_prefix_blocks: int = 0  # cached blocks that are not in the tree
    misses: dict[str, int] = {}  # since the console was opened: why prompt tokens were not in the cache -> tokens
    memory: list[MemoryLine] = []
    memory_supply: int = 0  # bytes that the ledger could plan with


def joined(views: Sequence[EngineView]) -> EngineView:
    """One view of several engines: their requests, blocks and misses; steps, events and memory are the first's."""
    first, *others = views
    replace = msgspec.structs.replace
    return replace(
        first,
        requests=[*first.requests, *(replace(one, row=-1) for view in others for one in view.requests)],
        num_more_waiting=sum(view.num_more_waiting for view in views),
        pools=[pool for view in views for pool in view.pools],
        misses=dict(sum((Counter(view.misses) for view in views), Counter[str]())),
    )
