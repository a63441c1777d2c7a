"""Log-probabilities of the model's own distribution: of the chosen token, its rank, and the likeliest tokens.

They are taken from the logits before any sampling parameter has changed them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quire.types.step import RowStart, TokenLogprobs
from quire.worker.sampling.base import ActiveRows, SampleRows, Selection, sampling_params

GatherLogprobs = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]  # the op `logprobs`, bound


class BatchLogprobs(NamedTuple):
    """What the op `logprobs` gives for some entries of a batch, still on the device."""

    integers: Tensor  # [a, 1 + k] int32: the rank of the chosen token, the likeliest tokens
    values: Tensor  # [a, 1 + k] float32: log-probabilities of the chosen token and of the likeliest

    def lines(self) -> list[Tensor]:
        """Two times [1 + k, a] int32, the second the bits of the log-probabilities."""
        return [self.integers.T, self.values.view(torch.int32).T]


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


def unpack_logprobs(tokens: list[int], packed: Tensor, counts: dict[int, int]) -> dict[int, TokenLogprobs]:
    """Entries from BatchLogprobs.lines() on the host, one after the other: [2 + 2 * k, a].

    Of the places in `counts`, with so many likeliest tokens.
    """
    lines = packed.T.contiguous()
    width = lines.shape[1] // 2
    integers, values = lines[:, :width].tolist(), lines[:, width:].contiguous().view(torch.float32).tolist()
    return {
        place: token_logprobs(tokens[place], integers[place], values[place], count) for place, count in counts.items()
    }


def token_logprobs(chosen: int, integers: list[int], values: list[float], count: int) -> TokenLogprobs:
    """One entry from a line of each of BatchLogprobs, with `count` likeliest tokens."""
    rank, *top = integers[: 1 + count]
    return TokenLogprobs([chosen, *top], values[: 1 + count], rank)


def prompt_logprobs(gather: GatherLogprobs, logits: Tensor, target_ids: Tensor, k: int) -> list[TokenLogprobs]:
    """Entries for prompt tokens target_ids [m] int64, each predicted by its line of logits [m, vocab_size]. Syncs."""
    count = resolve_count(k, logits.shape[1])
    integers, values = gather(logits, target_ids, count)
    lines = torch.cat([target_ids.to(torch.int32).unsqueeze(1), integers], dim=1).tolist()
    return [token_logprobs(line[0], line[1:], own, count) for line, own in zip(lines, values.tolist(), strict=True)]
