"""Log-probabilities of the model's own distribution: of the chosen token, its rank, and the likeliest tokens.

They are taken from the logits before any sampling parameter has changed them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.ops.order import likeliest
from quire.types.step import RowStart, TokenLogprobs
from quire.worker.sampling.base import ActiveRows, SampleRows, Selection, sampling_params

# Rows at a time in a recorded step, whose memory is never given back.
_PACKED_ROWS = 16


@dataclass
class BatchLogprobs:
    """Log-probabilities of some entries of a batch, still on the device."""

    chosen: Tensor  # [a] int64
    chosen_logprobs: Tensor  # [a] float32
    ranks: Tensor  # [a] int64
    top: Tensor  # [a, k] int64
    top_logprobs: Tensor  # [a, k] float32

    def integers(self) -> Tensor:
        """[a, 2 + k] int32"""
        columns = [self.chosen.unsqueeze(1), self.ranks.unsqueeze(1), self.top]
        return torch.cat(columns, dim=1).to(torch.int32)

    def floats(self) -> Tensor:
        """[a, 1 + k] float32"""
        return torch.cat([self.chosen_logprobs.unsqueeze(1), self.top_logprobs], dim=1)


class Logprobs:
    """Knows which rows want log-probabilities, and how many."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._counts: dict[int, int] = {}
        self._active = ActiveRows()

    def add_request(self, row: int, start: RowStart) -> None:
        count = sampling_params(start).logprobs
        if count is not None:
            self._counts[row] = resolve_count(count, self._vocab_size)
            self._active.add(row)

    def remove_request(self, row: int) -> None:
        self._counts.pop(row, None)
        self._active.discard(row)

    def select(self, rows: SampleRows) -> Selection | None:
        return self._active.select(rows)

    def counts(self, rows: SampleRows) -> list[int]:
        """How many likeliest tokens each of these rows wants, the chosen one apart."""
        return [self._counts[row] for row in rows.row_list]

    def wanted_counts(self, row_list: list[int]) -> dict[int, int]:
        """The same for those places of a batch that want any."""
        if not self._counts:
            return {}
        return {place: self._counts[row] for place, row in enumerate(row_list) if row in self._counts}


def resolve_count(count: int, vocab_size: int) -> int:
    """-1 asks for the whole vocabulary."""
    return vocab_size if count < 0 else min(count, vocab_size)


def gather_logprobs(logprobs: Tensor, chosen: Tensor, count: int) -> BatchLogprobs:
    """What is reported of logprobs [a, vocab_size] when `chosen` [a] was taken. No sync."""
    chosen_logprobs = logprobs.gather(1, chosen.unsqueeze(1))
    ranks = (logprobs > chosen_logprobs).sum(1) + 1
    if count > 0:
        top_logprobs, top = likeliest(logprobs, count)
    else:
        top_logprobs, top = logprobs[:, :0], chosen.unsqueeze(1)[:, :0]
    return BatchLogprobs(chosen, chosen_logprobs.squeeze(1), ranks, top, top_logprobs)


def packed_logprobs(logits: Tensor, chosen: Tensor, count: int) -> Tensor:
    """[2 + 2 * count, a] int32 of logits [a, vocab_size] when `chosen` [a] was taken. No sync.

    The ranks, the likeliest tokens, then the bits of their log-probabilities after that of the chosen one.
    """
    parts = []
    for some, taken in zip(logits.split(_PACKED_ROWS), chosen.to(torch.int64).split(_PACKED_ROWS), strict=True):
        found = gather_logprobs(some.to(torch.float32).log_softmax(-1), taken, count)
        parts.append(torch.cat([found.integers()[:, 1:], found.floats().view(torch.int32)], dim=1))
    return torch.cat(parts).T


def unpack_logprobs(tokens: list[int], packed: Tensor, counts: dict[int, int]) -> dict[int, TokenLogprobs]:
    """Entries from packed_logprobs() on the host: those at the places in `counts`, with so many likeliest tokens."""
    lines = packed.T.contiguous()
    width = lines.shape[1] // 2
    integers, floats = lines[:, :width].tolist(), lines[:, width:].contiguous().view(torch.float32).tolist()
    return {
        place: token_logprobs([tokens[place], *integers[place]], floats[place], count)
        for place, count in counts.items()
    }


def token_logprobs(integers: list[int], floats: list[float], count: int) -> TokenLogprobs:
    """One entry from a line of BatchLogprobs.integers() and of floats()."""
    chosen, rank, *top = integers[: 2 + count]
    return TokenLogprobs([chosen, *top], floats[: 1 + count], rank)


def prompt_logprobs(logits: Tensor, target_ids: Tensor, k: int) -> list[TokenLogprobs]:
    """Entries for prompt tokens target_ids [m] int64, each predicted by its line of logits [m, vocab_size]. Syncs."""
    count = resolve_count(k, logits.shape[1])
    found = gather_logprobs(logits.to(torch.float32).log_softmax(-1), target_ids, count)
    lines = zip(found.integers().tolist(), found.floats().tolist(), strict=True)
    return [token_logprobs(integers, floats, count) for integers, floats in lines]
