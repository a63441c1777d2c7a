"""Lines of the memory ledger: what each part will take, said by the part itself before anything is taken."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class LedgerLine:
    name: str
    num_bytes: int
    note: str
    in_step: bool = False  # taken and freed by a step of prompts: a part of what is measured of one


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """What parts size their memory by; known before KV blocks are counted."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int  # the longest that may come out of planning
    block_size: int
    vocab_size: int
    hidden_size: int
    itemsize: int  # bytes of an activation
    token_bytes: float  # what a step takes for each of its tokens, estimated or measured
    max_num_drafts: int = 0  # tokens of one step that verify drafts, besides one a request
    speculates: bool = False  # whether drafts are usual
    proposes: bool = False  # whether a model drafts, with rows of its own

    @property
    def max_num_samples(self) -> int:
        """Places of one step at which tokens are sampled."""
        return self.max_num_seqs + self.max_num_drafts


class Contributor(Protocol):
    """A part that takes memory, as an object or as a class that is made later."""

    def contributes(self, sizes: EngineSizes) -> Iterable[LedgerLine]: ...


def largest(lines: Iterable[LedgerLine]) -> list[LedgerLine]:
    """The largest line of each name: layers run one after the other and take the same memory."""
    found: dict[str, LedgerLine] = {}
    for line in lines:
        if line.name not in found or line.num_bytes > found[line.name].num_bytes:
            found[line.name] = line
    return list(found.values())
