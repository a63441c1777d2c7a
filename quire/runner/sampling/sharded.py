"""The choice of tokens where ranks share the vocabulary: each offers candidates, so that no logits are gathered."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.ops.base import Target
from quire.ops.candidates import OFFER_CANDIDATES, SAMPLE_AMONG, SampledRows
from quire.parallel.collectives import Collectives
from quire.types.sampling import SamplingParams

MOST_CANDIDATES = 64  # the largest top_k without a gather; a power of 2, as kernels need it


@dataclass(frozen=True)
class VocabShard:
    """This rank's slice of the vocabulary; `ranks` hold one each."""

    first_token: int
    ranks: int
    collectives: Collectives


class WholeVocab:
    """The null version: every step samples from all logits."""

    usual: tuple[tuple[bool, int], ...] = ((True, 0), (False, 0))  # greedy or not, and how many candidates

    def add_request(self, row: int, params: SamplingParams) -> None:
        return None

    def remove_request(self, row: int) -> None:
        return None

    def candidates(self, rows: list[int]) -> int:
        """How many tokens each rank has to offer for these rows; 0: all logits are needed."""
        return 0

    def choose(self, logits: Tensor, count: int, sampled: SampledRows | None = None) -> tuple[Tensor, Tensor]:
        """Tokens [m] int32 and highest logits [m] float32 of this rank's logits and the others'. No sync."""
        raise AssertionError("one rank has all logits")


class ShardedVocab(WholeVocab):
    usual = ((True, 1), (False, 1), (False, 0))

    def __init__(self, shard: VocabShard, target: Target) -> None:
        self._shard, self._sampled = shard, dict[int, int]()  # row -> its candidates
        self._offer, self._draw = OFFER_CANDIDATES.bind(target), SAMPLE_AMONG.bind(target)

    def add_request(self, row: int, params: SamplingParams) -> None:
        if params.greedy:
            return
        count = params.top_k if params.top_k > 0 else int(params.min_p == 0.0 and params.top_p == 1.0)
        self._sampled[row] = count if count <= MOST_CANDIDATES else 0

    def remove_request(self, row: int) -> None:
        self._sampled.pop(row, None)

    def candidates(self, rows: list[int]) -> int:
        counts = [self._sampled.get(row, 1) for row in rows]
        return 0 if 0 in counts else 1 if max(counts, default=1) == 1 else MOST_CANDIDATES

    def choose(self, logits: Tensor, count: int, sampled: SampledRows | None = None) -> tuple[Tensor, Tensor]:
        shard = self._shard
        offer = self._offer(logits, shard.first_token, count, sampled)
        offers = shard.collectives.all_gather(offer, shard.ranks * offer.shape[1])
        return self._draw(offers, shard.ranks, sampled)
