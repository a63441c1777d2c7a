"""Log-probabilities of the model's own distribution: of the chosen token, of the top ones, and of tokens named by id.

They are taken from the logits before any sampling parameter has changed them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec
import torch
from torch import Tensor

from quire.ops.base import Target
from quire.ops.logprobs import LOGPROBS
from quire.platform.transfer import upload
from quire.runner.sampling.base import sampling_params
from quire.types.step import RowStart, TokenLogprobs

_Asked = TypeVar("_Asked")
GatherLogprobs = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]  # the op `logprobs`, bound


class _AskingRows(Generic[_Asked]):
    """Rows that ask for something."""

    def __init__(self) -> None:
        self._asked: dict[int, _Asked] = {}

    def remove_request(self, row: int) -> None:
        self._asked.pop(row, None)

    def wanted(self, row_list: list[int]) -> dict[int, _Asked]:
        """Place in the batch -> what is asked for, of those rows that do."""
        if not self._asked:
            return {}
        return {place: self._asked[row] for place, row in enumerate(row_list) if row in self._asked}


class Logprobs(_AskingRows[int]):
    """Knows which rows want log-probabilities, and of how many top tokens beside the chosen one."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size

    def add_request(self, row: int, start: RowStart) -> None:
        count = sampling_params(start).logprobs
        if count is not None:
            self._asked[row] = resolve_count(count, self._vocab_size)


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


# Copies of logits that are made at a time: a row has one for each of its token ids.
_MAX_COPIES = 16


class AskedLogprobs(_AskingRows[tuple[int, ...]]):
    """Knows which rows name token ids. Their steps run eagerly: captured ones have no room for the answers."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._gather = LOGPROBS.bind(Target(device.type))

    def add_request(self, row: int, start: RowStart) -> None:
        if ids := sampling_params(start).logprob_token_ids:
            self._asked[row] = ids

    def gather(self, logits: Tensor, wanted: Mapping[int, Sequence[int]]) -> Tensor:
        """[n, 2] int32: the rank of each of the n tokens and the bits of its log-probability, in order. No sync.

        Each is what the op gives of a chosen token, so it is the same number, bit for bit, if the token is sampled.
        """
        lines = upload([place for place, ids in wanted.items() for _ in ids], logits.device, torch.int64)
        tokens = upload([token for ids in wanted.values() for token in ids], logits.device, torch.int64)
        found = []
        for first in range(0, len(lines), _MAX_COPIES):
            part = slice(first, first + _MAX_COPIES)
            ranks, values = self._gather(logits.index_select(0, lines[part]), tokens[part], 0)
            found.append(torch.cat([ranks, values.view(torch.int32)], dim=1))
        return torch.cat(found)


def add_asked(
    entries: Sequence[TokenLogprobs], places: Sequence[int], asked: Mapping[int, Sequence[int]], found: Tensor
) -> list[TokenLogprobs]:
    """Entries of `places` with what `gather` found for those that are among `asked`, on the host."""
    ranks, values = found[:, 0].tolist(), found[:, 1].contiguous().view(torch.float32).tolist()
    slices, first = {}, 0
    for place, ids in asked.items():
        slices[place] = slice(first, first + len(ids))
        first += len(ids)
    extended = []
    for place, entry in zip(places, entries, strict=True):
        if place in slices:
            part = slices[place]
            entry = msgspec.structs.replace(
                entry,
                token_ids=[*entry.token_ids, *asked[place]],
                logprobs=[*entry.logprobs, *values[part]],
                asked_ranks=ranks[part],
            )
        extended.append(entry)
    return extended
