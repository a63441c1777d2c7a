"""Log-probabilities of the model's own distribution: of the chosen token, its rank, and the top tokens.

They are taken from the logits before any sampling parameter has changed them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.runner.sampling.base import sampling_params
from quire.types.step import RowStart, TokenLogprobs

GatherLogprobs = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]  # the op `logprobs`, bound


class Logprobs:
    """Knows which rows want log-probabilities, and of how many top tokens beside the chosen one."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._counts: dict[int, int] = {}

    def add_request(self, row: int, start: RowStart) -> None:
        count = sampling_params(start).logprobs
        if count is not None:
            self._counts[row] = resolve_count(count, self._vocab_size)

    def remove_request(self, row: int) -> None:
        self._counts.pop(row, None)

    def wanted(self, row_list: list[int]) -> dict[int, int]:
        """Place in the batch -> number of top logprobs, for those rows that want any."""
        if not self._counts:
            return {}
        return {place: self._counts[row] for place, row in enumerate(row_list) if row in self._counts}


def resolve_count(count: int, vocab_size: int) -> int:
    """-1 asks for the whole vocabulary."""
    return vocab_size if count < 0 else min(count, vocab_size)


def pack_logprobs(integers: Tensor, values: Tensor) -> Tensor:
    """What the op `logprobs` gives, as one tensor [m, 2 + 2 * k] int32: first the integers, then the values' bits."""
    return torch.cat([integers, values.view(torch.int32)], dim=1)


def unpack_logprobs(packed: Tensor, tokens: list[int], counts: list[int]) -> list[TokenLogprobs]:
    """An entry for each line of pack_logprobs on the host: of a chosen token, with `count` top tokens."""
    width = packed.shape[1] // 2
    integers, values = packed[:, :width].tolist(), packed[:, width:].contiguous().view(torch.float32).tolist()
    return [token_logprobs(*line) for line in zip(tokens, integers, values, counts, strict=True)]


def token_logprobs(chosen: int, integers: list[int], values: list[float], count: int) -> TokenLogprobs:
    """One entry from a line of each of the op's results, with `count` top tokens."""
    rank, *top = integers[: 1 + count]
    return TokenLogprobs([chosen, *top], values[: 1 + count], rank)


def prompt_logprobs(gather: GatherLogprobs, logits: Tensor, target_ids: Tensor, k: int) -> list[TokenLogprobs]:
    """Entries for prompt tokens target_ids [m] int64, each predicted by its line of logits [m, vocab_size]. Syncs."""
    count = resolve_count(k, logits.shape[1])
    integers, values = gather(logits, target_ids, count)
    lines = torch.cat([target_ids.to(torch.int32).unsqueeze(1), integers], dim=1).tolist()
    return [token_logprobs(line[0], line[1:], own, count) for line, own in zip(lines, values.tolist(), strict=True)]
