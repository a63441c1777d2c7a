"""The kinds of KV groups: which blocks of a sequence the layers of a group still need.

A kind is a rule without state; what is cached and who uses which block is the business of quire/kv/groups.py. Adding
a kind is a file with a GroupKind and one line here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

from quire.utils.registry import Registry


class GroupKind:
    """Full attention, and what the others are variations of: every token reads all tokens before."""

    has_window: ClassVar[bool] = False  # whether its layers name a number of tokens
    releases: ClassVar[bool] = False  # whether blocks are given back while a request runs
    sparse: ClassVar[bool] = False  # whether only some entries of a block table get a block

    def __init__(self, window: int | None, block_size: int) -> None:
        self.window = window or 0
        self.block_size = block_size

    def first_needed(self, num_tokens: int) -> int:
        """The first block that is read by the token after `num_tokens`, or by any later one. Never decreases."""
        return 0

    def blocks_for(self, num_tokens: int, step_tokens: int) -> int:
        """Blocks that a request of `num_tokens` holds at its peak, computing at most `step_tokens` a step."""
        return ceil_div(num_tokens, self.block_size)

    def entries(self, first: int, last: int, marks: Collection[int]) -> Sequence[int]:
        """Which entries [first, last) of a table that grows get a block; the others stay the null block.

        `marks` are the entries whose content is worth caching, if the kind is sparse.
        """
        return range(first, last)


class Sliding(GroupKind):
    """A token reads itself and the window-1 tokens before it."""

    has_window = True
    releases = True

    def first_needed(self, num_tokens: int) -> int:
        return max(0, num_tokens - self.window + 1) // self.block_size

    def blocks_for(self, num_tokens: int, step_tokens: int) -> int:
        # A step reads the window-1 tokens before its first one; a span of n tokens that starts
        # anywhere touches up to ceil((n - 1) / block_size) + 1 blocks.
        span = self.window - 1 + step_tokens
        return min(super().blocks_for(num_tokens, step_tokens), ceil_div(span - 1, self.block_size) + 1)


class Chunked(Sliding):
    """A token reads the tokens of its own chunk, up to itself: those from position // window * window on."""

    def first_needed(self, num_tokens: int) -> int:
        return num_tokens // self.window * self.window // self.block_size


class State(GroupKind):
    """A recurrent state, which stands for all tokens before it; a block holds one.

    Entry i of a row's table, where it has a block, is the state after the tokens of block i, or after as many of them
    as are computed. A step reads the entry of the token before its first one and writes all entries that have a block
    from its first token's on. So a row has one state, in its last entry, and a checkpoint is an entry that the row
    has moved on from: nothing is copied. Blocks are given to the marks, to the last two entries of each step (a row
    that samples nothing goes on from before its last token) and to drafts; marks are cached, and when a row ends, its
    last full entry. Drafts that do not hold leave a state that is folded over certain tokens alone: within a block, a
    kernel can go on from any token after the last certain one.
    """

    releases = True
    sparse = True

    def first_needed(self, num_tokens: int) -> int:
        return max(0, num_tokens // self.block_size - 1)  # the last full entry: what a later turn goes on from

    def blocks_for(self, num_tokens: int, step_tokens: int) -> int:
        # The last two entries before a step and those that it leaves, and the marks between them.
        return min(super().blocks_for(num_tokens, step_tokens), 4 + MAX_MARKS)

    def entries(self, first: int, last: int, marks: Collection[int]) -> Sequence[int]:
        if last <= first:
            return ()
        return sorted({max(first, last - 2), last - 1}.union(mark for mark in marks if first <= mark < last))


# Per sequence: the ends of its prompt and of its first and last messages, and where other groups had a longer hit.
MAX_MARKS = 4
STATES_OF_A_ROW = 2  # that a row which decodes holds: its own, and the last full one

KINDS: Registry[type[GroupKind]] = Registry(
    "kind of KV group",
    "quire.kv",
    {
        "full": "kinds:GroupKind",
        "latent": "kinds:GroupKind",
        "sliding": "kinds:Sliding",
        "chunked": "kinds:Chunked",
        "state": "kinds:State",
    },
)


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)
